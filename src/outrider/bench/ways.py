"""Ways to decode: plainly, or with a method that drafts so far ahead."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from outrider.errors import InvalidParameterError
from outrider.llm import default_model
from outrider.propose import methods
from outrider.propose.draft_model import DraftModel
from outrider.propose.speculation import PLAIN, SpeculationConfig

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
_FORM = "Use NAME or NAME:LENGTH, like plain, draft_model:3, suffix-tree:16, or module:Class:4 for a method of yours."


class Recipe(BaseModel):
    """How to use a way.

    Attributes:
        python: A line of Python.
        command: A command line.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: str
    command: str


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
        return self.config.name != "draft_model"

    def recipe(self, model: str, dtype: str, *, greedy: bool) -> Recipe:
        """What to paste in order to decode this way.

        Args:
            model: Its name in reports. The embedded one is the default and is left out. The wide one stands for a model of
                the reader's, and so do its name and that of its draft model.
            dtype: Of the weights; or int8.
            greedy: Whether the text was.
        """
        target = {"embedded": None, "wide": "MODEL"}.get(model, model)
        config = self._named_for_readers(model)
        precision = {"dtype": "bfloat16", "quantization": "int8"} if dtype == "int8" else {"dtype": dtype}
        first = [] if target is None else [target]
        arguments = [*map(_quoted, first), *_arguments(precision), f"speculation={_in_python(config)}"]
        options = {**precision, **_on_command_line(config)} | ({"temperature": 0} if greedy else {})
        words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        command = f'{shlex.join(["outrider", "generate", *first, *words])} --prompt "..."'
        return Recipe(python=f"LLM({', '.join(arguments)})", command=command)

    def _named_for_readers(self, model: str) -> SpeculationConfig:
        """The settings with a reader's draft model in place of the package's own."""
        method = self.config.method
        if not isinstance(method, DraftModel) or method.model != default_model("draft"):
            return self.config
        return self.config.replace(method=method.replace(model=None if model == "embedded" else "DRAFT"))


def _in_python(config: SpeculationConfig) -> str:
    """A call that makes these settings, defaults left out."""
    method = config.method
    if method is None:
        return '"none"'
    settings = method.model_dump(exclude_defaults=True)
    made = f"{type(method).__name__}({', '.join(_arguments(settings))})" if settings else _quoted(method.name)
    return f"SpeculationConfig(method={made}, num_draft_tokens={config.num_draft_tokens})"


def _on_command_line(config: SpeculationConfig) -> dict[str, Any]:
    """Options that ask for these settings."""
    if config.method is None:
        return {"method": "none"}
    settings = config.method.model_dump(mode="json", exclude_defaults=True)
    length = {"num_draft_tokens": config.num_draft_tokens}
    if isinstance(config.method, DraftModel) and settings.keys() <= {"model"}:
        return {**({"draft_model": settings["model"]} if settings else {"method": "draft_model"}), **length}
    return {"method": json.dumps({"method": config.name, **settings}) if settings else config.name, **length}


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
    form = re.fullmatch(r"([\w-]+|[\w.]+:[A-Za-z_]\w*)(?::([1-9]\d{0,2}))?", text)
    if form is None or form[1] == "none" or text.startswith("plain:"):
        raise InvalidParameterError("way", text, "not a way", _FORM)
    name, length = form[1], form[2]
    if name == "plain":
        return Way("plain", PLAIN)
    given: dict[str, Any] = {"method": _known(name, text)}
    if name == "suffix-tree":
        given = {"method": "suffix", "branches": True}
    if length is not None:
        given["num_draft_tokens"] = int(length)
    if name == "draft_model":
        if draft_model is None:
            raise InvalidParameterError("way", text, "there is no draft model", "Add --draft-model, or leave it out.")
        given["model"] = draft_model
    config = SpeculationConfig.of(given)
    return Way(f"{name.replace('-', ' ') if name == 'suffix-tree' else config.name} k={config.num_draft_tokens}", config)


def _known(name: str, way: str) -> str:
    """The method's name; one that is given as module:Class is imported.

    Raises:
        InvalidParameterError: There is no such method.
    """
    try:
        if ":" in name:
            return methods.load(name).name
        methods.find("suffix" if name == "suffix-tree" else name)
    except InvalidParameterError as error:
        raise InvalidParameterError("way", way, error.problem, _FORM) from error
    return name
