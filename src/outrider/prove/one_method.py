"""The proofs of one method: the engine's joint distribution with it, identity of text, truth of the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from outrider.params import SamplingParams
from outrider.propose import methods
from outrider.propose.speculation import SpeculationConfig
from outrider.prove.engine_law import DRAFT, LOOKUP, Setting
from outrider.prove.own_model import OwnModel
from outrider.prove.report import Finding
from outrider.prove.runner import Proof

#: Fields of SpeculationConfig that the settings of a proof vary.
_VARIED = frozenset({"num_draft_tokens", "tree", "rule", "draft_sampling"})


def method_settings(asked: Mapping[str, Any]) -> list[Setting]:
    """Ways to use a method, over a vocabulary of three.

    Args:
        asked: Its settings in the form of one mapping; a draft model without a model takes the proof's own.
    """
    method = {name: value for name, value in asked.items() if name not in _VARIED}
    if method["method"] == "draft_model":
        method.setdefault("model", DRAFT)
    base = {**method, "num_draft_tokens": 2}
    found = [
        Setting("as it is", base),
        Setting("token rule", {**base, "rule": "token"}),
        Setting("walk", {**base, "rule": "walk"}),
        Setting("seeded", base, {"seed": 5}),
        Setting("most likely tokens", {**base, "draft_sampling": "greedy"}),
        Setting("temperature and top_p", base, {"temperature": 1.5, "top_p": 0.8}),
        Setting("penalties", base, {"frequency_penalty": -0.6, "repetition_penalty": 1.7}),
        Setting("stop tokens", base, {"stop_token_ids": (2,)}),
        Setting("two samples", {**base, "num_draft_tokens": 1}, {"n": 2, "max_tokens": 2}),
        Setting("behind a lookup", turns=(({**LOOKUP, "num_draft_tokens": 1}, base),)),
        Setting("a lookup behind it", turns=(({**base, "num_draft_tokens": 1}, {**LOOKUP, "num_draft_tokens": 1}),)),
        Setting("in turns with others", turns=((base,), (), (LOOKUP,))),
    ]
    if methods.find(method["method"]).takes_tree:
        tree = {**method, "tree": (2, 1)}
        found += [Setting("tree", tree), Setting("tree, token rule", {**tree, "rule": "token"})]
    return found


def method_proofs(
    asked: Mapping[str, Any], prove: Callable[[Setting, int], Finding], own: OwnModel, *, quick: bool
) -> Iterator[Proof]:
    """Claims about one method, and what establishes each.

    Args:
        asked: The method's settings in the form of one mapping.
        prove: Computes the engine's joint distribution under a setting, of so many tokens.
        own: The model on which texts are compared.
        quick: Fewer settings, shorter texts.
    """
    settings = method_settings(asked)
    for setting in settings[:4] if quick else settings:
        yield f"joint distribution: {setting.name}", partial(prove, setting, 3)
    length = 16 if quick else 32
    yield "greedy text is identical", partial(own.text_is_identical, SamplingParams(temperature=0, max_tokens=length))
    yield "seeded text is identical", partial(own.text_is_identical, SamplingParams(seed=11, max_tokens=length))
    yield "KV memory is true", partial(own.cache_is_true, length // 2)
    yield "it drafts", partial(own.drafts, length)


def speculations(asked: Mapping[str, Any]) -> list[SpeculationConfig]:
    """A method as it was asked for, and at three lengths."""
    lengths = ({**asked, "num_draft_tokens": length} for length in (1, 3, 6))
    return [SpeculationConfig.of(asked), *(SpeculationConfig.of(settings) for settings in lengths)]
