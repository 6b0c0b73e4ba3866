"""Decoding configurations to compare: plain decoding, or a method with a number of draft tokens."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from outrider.config import QUANTIZATIONS, ROUNDED_ROWS, default_model
from outrider.errors import InvalidParameterError
from outrider.loading.gguf.header import is_gguf
from outrider.loading.sources import check_sources
from outrider.propose import settings as registry
from outrider.propose.compositions import Auto, Composition
from outrider.propose.defaults import SpeculationDefaults, drafter_at
from outrider.propose.draft_model import DraftModel
from outrider.propose.row_heads import FolderMethod, HeadMethod
from outrider.propose.settings import PLAIN, SpeculationConfig

#: The ways of a usual run, unless others are asked for, and those of a full run.
USUAL = ("plain", "auto", "draft_model:3", "draft_model:5", "ngram:3", "suffix:16", "suffix-tree:16")
ALL = (
    "plain",
    "auto",
    *(f"draft_model:{k}" for k in (1, 2, 3, 5, 7)),
    *(f"ngram:{k}" for k in (3, 5, 10)),
    "suffix:3",
    "suffix:16",
    "suffix-tree:16",
)
_FORM = (
    "Use NAME, NAME:LENGTH or NAME:TREE:LENGTH, like plain, draft_model:3, draft_model:3,2,1, draft_model:best_first:12, "
    "suffix-tree:16; NAME=FOLDER:LENGTH for a draft model or heads from a folder; or module:Class:4 for a method of yours."
)
_TREE = r"best_first|sequoia|\d{1,2}(?:,\d{1,2})+"


class Recipe(BaseModel):
    """Says how to decode in one way."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: str  # a line of Python
    command: str  # a command line


def rounding(dtype: str) -> str | None:
    """Returns how weights are rounded in this precision. None where they are not."""
    name = dtype.removesuffix(ROUNDED_ROWS)
    return name if name in QUANTIZATIONS else None


def rounds_rows(dtype: str) -> bool:
    """Tells whether rows are rounded to 8 bits in this precision."""
    return dtype.endswith(ROUNDED_ROWS)


def precision(dtype: str) -> dict[str, Any]:
    """The settings of a model for a dtype, or for weights that are rounded this way, which are used with bfloat16."""
    weights = rounding(dtype)
    rows = {"activations": "int8"} if rounds_rows(dtype) else {}
    if weights is None:
        return {"dtype": dtype.removesuffix(ROUNDED_ROWS), **rows}
    return {"dtype": "bfloat16", "quantization": weights, **rows}


@dataclass(frozen=True)
class DecodingConfig:
    """One way to decode."""

    name: str  # the name in reports, such as "draft_model k=3"
    config: SpeculationConfig  # the settings of the way

    @property
    def plain(self) -> bool:
        return not self.config.enabled

    @property
    def replays(self) -> bool:
        """Tells whether the way can replay a text: the processor that forces the text must not change its drafts."""
        return self.config.method is None or not self.config.method.grows_from_probabilities

    def recipe(self, model: str, dtype: str, *, greedy: bool) -> Recipe:
        """The lines to paste in order to decode this way."""
        target = {"embedded": None, "wide": "MODEL"}.get(model, model)
        config, draft_model = self._named_for_readers(model)
        how = precision(dtype)
        if is_gguf(model) and not rounds_rows(dtype):
            how["activations"] = "none"
        first = [] if target is None else [target]
        beside = {} if draft_model is None else {"draft_model": draft_model}
        arguments = [*map(_quoted, first), *_arguments(how), *_arguments(beside), f"speculation={_in_python(config)}"]
        options = {**how, **beside, **_on_command_line(config)} | ({"temperature": 0} if greedy else {})
        words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        command = f'{shlex.join(["outrider", "generate", *first, *words])} --prompt "..."'
        return Recipe(python=f"LLM({', '.join(arguments)})", command=command)

    def _named_for_readers(self, model: str) -> tuple[SpeculationConfig, str | None]:
        """The settings with the reader's draft model in place of the embedded one, and a draft model to name apart."""
        method = self.config.method
        if self.config.engine_chooses:
            drafts = [each.method.model for each in self.config.candidates if isinstance(each.method, DraftModel)]
            return self.config.replace(method=Auto()), _for_readers(drafts[0], model) if drafts else None
        if not isinstance(method, DraftModel):
            return self.config, None
        return self.config.replace(method=method.replace(model=_for_readers(method.model, model))), None


def _for_readers(draft_model: str | None, model: str) -> str | None:
    if draft_model != default_model("draft"):
        return draft_model
    return None if model == "embedded" else "DRAFT"


def _in_python(config: SpeculationConfig) -> str:
    """A Python call that makes these settings, without those that are defaults."""
    method = config.method
    if method is None:
        return '"none"'
    settings = method.model_dump(exclude_defaults=True)
    made = f"{type(method).__name__}({', '.join(_arguments(settings))})" if settings else _quoted(method.name)
    own: dict[str, Any] = {"tree": config.tree} if config.tree else {}
    own["num_draft_tokens"] = config.num_draft_tokens
    return f"SpeculationConfig({', '.join([f'method={made}', *_arguments(own)])})"


def _on_command_line(config: SpeculationConfig) -> dict[str, Any]:
    """The command-line options that ask for these settings."""
    if config.method is None:
        return {"method": "none"}
    settings = config.method.model_dump(mode="json", exclude_defaults=True)
    length: dict[str, Any] = {"num_draft_tokens": config.num_draft_tokens}
    if config.tree:
        length["tree"] = config.tree if isinstance(config.tree, str) else ",".join(map(str, config.tree))
    if type(config.method) is DraftModel and settings.keys() <= {"model"}:
        return {**({"draft_model": settings["model"]} if settings else {"method": "draft_model"}), **length}
    return {"method": json.dumps({"method": config.name, **settings}) if settings else config.name, **length}


def _arguments(given: dict[str, Any]) -> list[str]:
    return [f"{name}={_quoted(value)}" for name, value in given.items()]


def _quoted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def parse_ways(names: Sequence[str], draft_model: str | None) -> list[DecodingConfig]:
    """The ways with the given names, each once. Plain decoding comes first, since every speedup is over it."""
    ways = {way.name: way for way in (_parse(name, draft_model) for name in ("plain", *names))}
    return list(ways.values())


def _parse(text: str, draft_model: str | None) -> DecodingConfig:
    form = re.fullmatch(rf"([\w-]+|[\w.]+:[A-Za-z_]\w*)(?:=([^:]+))?(?::({_TREE}))?(?::([1-9]\d{{0,2}}))?", text)
    if form is None or form[1] == "none" or text.startswith(("plain:", "plain=")):
        raise InvalidParameterError("way", text, "not a way", _FORM)
    name, model, tree, length = form.groups()
    if name == "plain":
        return DecodingConfig("plain", PLAIN)
    given: dict[str, Any] = {"method": _known(name, text)}
    if name == "suffix-tree":
        given = {"method": "suffix", "branches": True}
    if tree is not None:
        given["tree"] = [int(width) for width in tree.split(",")] if "," in tree else tree
    if length is not None:
        given["num_draft_tokens"] = int(length)
    if name == "draft_model" and model is None and draft_model is None:
        raise InvalidParameterError("way", text, "there is no draft model", "Add --draft-model, or leave it out.")
    kind = registry.find(given["method"])
    if model is None or not (issubclass(kind, FolderMethod) and Path(model).is_dir()):  # heads may have no config.json
        check_sources(way=model)
    if issubclass(kind, (Auto, Composition)):
        config = SpeculationDefaults.of(given, model or draft_model, None).config  # as LLM(draft_model=...) has it
        shown = name if name == Auto.name else f"{name} k={config.num_draft_tokens}"
        return DecodingConfig(shown if model is None else f"{shown} {Path(model).name}", config)
    chosen = model or (draft_model if name == "draft_model" else None)
    if name == "draft_model" and chosen is not None:
        given["method"] = drafter_at(chosen).name  # a head or an assistant has a method of its own
    config = SpeculationConfig.of(given if chosen is None else {**given, "model": chosen})
    if isinstance(config.method, HeadMethod) and chosen is None:
        raise InvalidParameterError("way", text, "it names no heads", f"Use {name}=FOLDER, where the heads are.")
    shown = "suffix tree" if name == "suffix-tree" else config.name
    shown += "" if model is None else f" {Path(model).name}"
    shape = "" if tree is None else f" ({tree})" if "," in tree else f" {tree.replace('_', '-')}"
    return DecodingConfig(f"{shown}{shape} k={config.num_draft_tokens}", config)


def _known(name: str, way: str) -> str:
    """The method's name; one that is given as module:Class is imported."""
    try:
        if ":" in name:
            return registry.load(name).name
        registry.find("suffix" if name == "suffix-tree" else name)
    except InvalidParameterError as error:
        raise InvalidParameterError("way", way, error.problem, _FORM) from error
    return name
