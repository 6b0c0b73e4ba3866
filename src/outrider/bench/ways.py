"""Ways to decode: plainly, or with a proposer that drafts so far ahead."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from outrider.config import PLAIN, SpeculationConfig
from outrider.errors import InvalidParameterError
from outrider.llm import default_model
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


class Recipe(BaseModel):
    """How to use a way.

    Attributes:
        python: A line of Python.
        command: A command line; None where the command has no option for it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: str
    command: str | None


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

    def recipe(self, model: str, dtype: str, *, greedy: bool) -> Recipe:
        """What to paste in order to decode this way.

        Args:
            model: Its name in reports. The embedded one is the default and is left out. The wide one stands for a model of
                the reader's, and so do its name and that of its draft model.
            dtype: Of the weights; or int8.
            greedy: Whether the text was.
        """
        target = {"embedded": None, "wide": "MODEL"}.get(model, model)
        draft_model = self.config.draft_model
        if draft_model == default_model("draft"):
            draft_model = None if model == "embedded" else "DRAFT"
        speculation: dict[str, Any] = {"proposer": self.config.proposer, "draft_model": draft_model}
        if not self.plain:
            speculation |= {"num_draft_tokens": self.config.num_draft_tokens}
            speculation |= {"suffix_tree": True} if self.config.suffix_tree else {}
        speculation = {name: value for name, value in speculation.items() if value is not None}
        precision = {"dtype": "bfloat16", "quantization": "int8"} if dtype == "int8" else {"dtype": dtype}
        first = [] if target is None else [target]
        config = f"SpeculationConfig({', '.join(_arguments(speculation))})"
        arguments = [*map(_quoted, first), *_arguments(precision), f"speculation={config}"]
        options = {**precision, **speculation} | ({"temperature": 0} if greedy else {})
        words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        command = f'{shlex.join(["outrider", "generate", *first, *words])} --prompt "..."'
        return Recipe(python=f"LLM({', '.join(arguments)})", command=None if self.config.suffix_tree else command)


def _arguments(given: dict[str, Any]) -> list[str]:
    return [f"{name}={_quoted(value)}" for name, value in given.items()]


def _quoted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


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
