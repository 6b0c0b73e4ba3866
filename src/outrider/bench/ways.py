"""Ways to decode: plainly, or with a proposer that drafts so far ahead."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.config import PLAIN, SpeculationConfig
from outrider.errors import InvalidParameterError
from outrider.propose import registry

#: What a run measures unless it is told otherwise, and what a full one does.
USUAL = ("plain", "draft_model:3", "draft_model:5", "ngram:3", "suffix:16", "suffix-tree:16")
ALL = (
    "plain",
    *(f"draft_model:{k}" for k in (1, 2, 3, 5, 7)),
    *(f"ngram:{k}" for k in (3, 5, 10)),
    "suffix:3",
    "suffix:16",
    "suffix-tree:16",
)
_FORM = "Use NAME or NAME:LENGTH, like plain, draft_model:3, ngram:5, suffix:16, suffix-tree:16."


@dataclass(frozen=True)
class Way:
    """One way to decode.

    Attributes:
        name: As reports show it: "draft_model k=3".
        config: The settings behind it.
    """

    name: str
    config: SpeculationConfig

    @property
    def plain(self) -> bool:
        return not self.config.enabled

    @property
    def replays(self) -> bool:
        """Whether its drafts are untouched by the processor that forces a recorded text."""
        return self.config.proposer != "draft_model"


def parse_ways(names: Sequence[str], draft_model: str | None) -> list[Way]:
    """Ways by name, each once, plain decoding first: every speedup is over it.

    Args:
        names: In the form NAME or NAME:LENGTH.
        draft_model: Folder or hub id for the ways that need one.

    Raises:
        InvalidParameterError: No such way, or one that needs a draft model where there is none.
    """
    ways = {way.name: way for way in (_parse(name, draft_model) for name in ("plain", *names))}
    return list(ways.values())


def _parse(text: str, draft_model: str | None) -> Way:
    form = re.fullmatch(r"([\w-]+)(?::([1-9]\d{0,2}))?", text)
    if form is None or form[1] == "none" or text.startswith("plain:"):
        raise InvalidParameterError("way", text, "not a way", _FORM)
    name, length = form[1], form[2]
    if name == "plain":
        return Way("plain", PLAIN)
    tree = name == "suffix-tree"
    given: dict[str, Any] = {"proposer": "suffix", "suffix_tree": True} if tree else {"proposer": name}
    if length is not None:
        given["num_draft_tokens"] = int(length)
    if name == "draft_model":
        if draft_model is None:
            raise InvalidParameterError("way", text, "there is no draft model", "Add --draft-model, or leave it out.")
        given["draft_model"] = draft_model
    try:
        registry.check_name(given["proposer"])
    except InvalidParameterError:
        raise InvalidParameterError("way", text, "no such proposer", _FORM) from None
    config = SpeculationConfig(**given)
    return Way(f"{'suffix tree' if tree else name} k={config.num_draft_tokens}", config)
