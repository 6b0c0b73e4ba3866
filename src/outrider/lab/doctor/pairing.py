"""Checks whether a draft model fits a target, from tokenizers and configurations, before weights are read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from outrider.config import ModelConfig
from outrider.errors import OutriderError
from outrider.lab.doctor.verdict import Finding, Level
from outrider.loading.configuration import read_context
from outrider.loading.sources import check_sources
from outrider.loading.templates import TemplateLimits, render_conversation, renders_by_template
from outrider.loading.tokenizers import given_tokenizer
from outrider.model.vocabulary import ModelVocabulary
from outrider.propose.bridge import VocabularyReport, report

_CONVERSATION = [{"role": "user", "content": "How long is a day?"}, {"role": "assistant", "content": "24 hours."}]


@dataclass(frozen=True)
class Pairing:
    """A target and a draft model before they are loaded."""

    draft: str  # the draft model
    findings: tuple[Finding, ...]  # what was found
    fits: bool  # whether the method can draft with it at all


def examine_pairing(target: str, draft: str, method: str, sample: str) -> Pairing:
    """Compare vocabularies, chat templates and contexts. The method "draft_model" needs the same tokens, and
    "cross_vocabulary" does not."""
    check_sources(draft_model=draft)
    ours = given_tokenizer(target)
    try:
        theirs, context = given_tokenizer(draft), read_context(ModelConfig(model=draft))
        compared = report(ModelVocabulary(ours, target), ModelVocabulary(theirs, draft), sample)
    except OutriderError as error:
        return Pairing(draft, (Finding("vocabulary", Level.WRONG, f"It cannot be compared: {error}"),), fits=False)
    vocabulary = _vocabulary(compared, method)
    found = (vocabulary, _template(ours, theirs), _context(read_context(ModelConfig(model=target)), context))
    return Pairing(draft, found, fits=vocabulary.level is not Level.WRONG)


def _vocabulary(compared: VocabularyReport, method: str) -> Finding:
    if compared.same_ids:
        text = f"The draft model has the same {compared.target_size:,} tokens as the target."
        return Finding("vocabulary", Level.OK, text)
    shared = (
        f"{compared.num_shared:,} of the target's {compared.target_size:,} tokens are shared, and they write "
        f"{compared.share_of_text:.0%} of the sample."
    )
    if compared.match is None:
        remedy = "Use a draft model of the target's family."
        return Finding("vocabulary", Level.WRONG, f"The draft model speaks other tokens: {shared}", remedy)
    settings = json.dumps({"method": "cross_vocabulary", "model": compared.draft, "match": compared.match})
    if method == "draft_model":
        text = f"The draft model speaks other tokens, so that it cannot draft as it is: {shared}"
        return Finding("vocabulary", Level.WRONG, text, f"Use --method '{settings}', or a draft model of the family.")
    return Finding("vocabulary", Level.OK, shared, f"The setting that suits the pair is --method '{settings}'.")


def _template(target: Any, draft: Any) -> Finding:
    ours, theirs = (_rendered(tokenizer) for tokenizer in (target, draft))
    if ours is None and theirs is None:
        return Finding("chat template", Level.OK, "Neither model has one: both complete texts.")
    if ours == theirs:
        return Finding("chat template", Level.OK, "Both models write a conversation in the same way.")
    if ours is None or theirs is None:
        who = "draft model" if ours is None else "target"
        text = f"Only the {who} has one, so the two were trained on texts of different form."
    else:
        text = "The two models write a conversation in different ways, so they were trained on texts of different form."
    return Finding("chat template", Level.NOTE, text, "Expect fewer accepted tokens in chats, and measure on chats.")


def _rendered(tokenizer: Any) -> str | None:
    """A conversation in the form of a tokenizer's chat template; None where it has none or cannot write this one."""
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    try:
        if renders_by_template(tokenizer):
            return render_conversation(tokenizer, _CONVERSATION, None, {}, TemplateLimits())
        return str(tokenizer.apply_chat_template(_CONVERSATION, tokenize=False))
    except Exception:  # whatever the template itself raises
        return None


def _context(target: int, draft: int) -> Finding:
    if draft >= target:
        text = f"The draft model reads {draft:,} tokens, and the target {target:,}."
        return Finding("context", Level.OK, text)
    text = f"The draft model reads {draft:,} tokens and the target {target:,}: behind {draft:,} tokens nobody drafts."
    return Finding("context", Level.NOTE, text, "For longer texts use a draft model with a longer context.")
