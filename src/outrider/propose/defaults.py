"""Chooses the default speculation of an LLM where the caller leaves it open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Self

from outrider.errors import ContradictionError, InputError, InvalidParameterError, ModelError
from outrider.propose.compositions import Auto, Composition, Then, named, parts_of
from outrider.propose.draft_model import DraftModel
from outrider.propose.settings import PLAIN, Method, SpeculationConfig, find


@dataclass(frozen=True)
class SpeculationDefaults:
    """Holds what an engine was told at its start about speculation, from which it completes the settings of later calls."""

    config: SpeculationConfig = PLAIN  # the settings of calls that bring none
    embedded_draft: str | None = None  # the draft model that comes with the package, where the target came with it too
    left_open: bool = False  # whether nobody said who drafts

    @classmethod
    def of(cls, speculation: Any, draft_model: str | PathLike[str] | None, embedded_draft: str | None) -> Self:
        """From the arguments of `LLM`; the engine chooses where they leave everything open.

        Args:
            speculation: As `SpeculationConfig.of` takes it, or None.
        """
        asked = with_draft_model(Auto.name if speculation is None else speculation, draft_model)
        config = SpeculationConfig.of(asked)
        left_open = isinstance(config.method, Auto) and not config.method.methods and embedded_draft is None
        return cls(cls(embedded_draft=embedded_draft).complete(asked), embedded_draft, left_open)

    def with_carried(self, name: str) -> Self:
        """The settings for a target whose own checkpoint carries what this method drafts with, where nobody said who
        drafts."""
        if not self.left_open:
            return self
        longest = self.config.num_draft_tokens
        methods = with_chain(usual_methods(SpeculationConfig.of(name).method, longest))
        return replace(self, config=self.config.replace(method=Auto(methods=methods)), left_open=False)

    @property
    def draft(self) -> DraftModel | None:
        """The draft model, or the first among the methods that the engine chooses from."""
        parts = (part.method for each in self.config.candidates for part in parts_of(each))
        return next((part for part in parts if isinstance(part, DraftModel)), None)

    @property
    def kept(self) -> Method | None:
        """The method whose models stay loaded: where the engine chooses, its draft model."""
        several = self.config.engine_chooses or isinstance(self.config.method, Composition)
        return self.draft if several else self.config.method

    def check_sources(self) -> None:
        """Refuse draft models and heads that are not there, before anything is loaded; raises InputError."""
        for place, candidate in enumerate(self.config.candidates):
            around = f"methods.{place}." if self.config.engine_chooses else ""
            for own, method in _methods(candidate, ""):
                is_given = isinstance(method, DraftModel) and not own
                method.check_source("draft_model" if is_given else f"{around}{own}model")

    def complete(self, speculation: Any) -> SpeculationConfig:
        """Settings of a call with what they leave open: the draft model, or the methods to choose from."""
        config = SpeculationConfig.of(speculation)
        if isinstance(config.method, Auto):
            return config.replace(method=self._complete_auto(config.method, config.num_draft_tokens))
        if config.method is None:
            return config
        method = config.method
        if isinstance(method, Composition) and not method.methods:
            method = method.replace(methods=self._usual(config.num_draft_tokens)[::-1])  # a lookup comes first
        if isinstance(method, DraftModel) and method.model is None:
            method = self._complete_draft(method)
        method = method.with_nested({place: self._inner(place, inner) for place, inner in method.nested.items()})
        return config if method is config.method else config.replace(method=method)

    def _inner(self, place: str, inner: SpeculationConfig) -> SpeculationConfig:
        """Settings inside others, completed as settings at the top are; an error names their place."""
        try:
            return self.complete(inner)
        except InputError as error:
            raise named(place, error) from None

    def _complete_draft(self, asked: DraftModel) -> DraftModel:
        standing = self.draft
        if standing is not None:
            given = {name for name in asked.model_fields_set if getattr(asked, name) is not None}
            known = type(asked).model_fields.keys() - given
            return asked.replace(**{name: value for name, value in standing if name in known})
        if self.embedded_draft is not None:
            return asked.replace(model=self.embedded_draft)
        remedy = 'Use LLM(..., draft_model="..."), or SpeculationConfig(method=DraftModel(model="...")).'
        raise InvalidParameterError("draft_model", None, f"method={asked.name!r} needs one", remedy)

    def _usual(self, longest: int) -> tuple[SpeculationConfig, ...]:
        has_draft = self.draft is not None or self.embedded_draft is not None
        return usual_methods(DraftModel() if has_draft else None, longest)

    def _complete_auto(self, asked: Auto, longest: int) -> Auto:
        """The methods that are given; or else the engine's own, or a lookup, its draft model if it has one, and both."""
        if not asked.methods and isinstance(self.config.method, Auto):
            return self.config.method
        whole = asked if asked.methods else asked.replace(methods=with_chain(self._usual(longest)))
        return whole.with_nested({place: self._inner(place, inner) for place, inner in whole.nested.items()})


def usual_methods(draft: Method | None, longest: int = Auto.default_num_draft_tokens) -> tuple[SpeculationConfig, ...]:
    """Returns what the engine chooses from where nobody says: a lookup, beside a draft model if there is one, and else
    beside what the target held likely before. Its own first layers draft only where a request says so: without a head that
    was trained to exit there they cost more than they bring.

    Args:
        longest: Most draft tokens.
    """
    methods = ("suffix", "token_recycling") if draft is None else (draft, "suffix")
    return tuple(SpeculationConfig.of(method).replace(num_draft_tokens=longest) for method in methods)


def with_chain(methods: tuple[SpeculationConfig, ...]) -> tuple[SpeculationConfig, ...]:
    """The usual methods, and where one is a draft model or a head, also the lookup with that behind it: what is looked up
    costs nothing, and where nothing is found the model drafts.
    """
    if not any(each.method is not None and each.method.grows_from_probabilities for each in methods):
        return methods
    return (*methods, SpeculationConfig(method=Then(methods=methods[::-1]), num_draft_tokens=methods[0].num_draft_tokens))


def _methods(config: SpeculationConfig, place: str) -> Iterator[tuple[str, Method]]:
    """The methods of settings and of those inside them, each with its place."""
    if config.method is None:
        return
    yield place, config.method
    for own, inner in config.method.nested.items():
        yield from _methods(inner, f"{place}{own}.")


def _with_draft(config: SpeculationConfig, draft_model: str) -> SpeculationConfig:
    """The settings with this draft model in the members that name none."""
    method = config.method
    if method is None:
        return config
    if isinstance(method, DraftModel) and method.model is None:
        method = method.replace(model=draft_model)
    method = method.with_nested({place: _with_draft(inner, draft_model) for place, inner in method.nested.items()})
    return config.replace(method=method)


def drafter_at(source: str) -> Method:
    """The method that drafts with what lies at a path: an assistant of Gemma 4, a head, layers that predict several
    tokens, or a draft model."""
    if not Path(source).exists():
        return DraftModel(model=source)
    from outrider.heads.assistant import is_assistant  # which imports torch
    from outrider.heads.checkpoint import method_of_heads
    from outrider.heads.formats.mtp import holds_mtp_alone
    from outrider.heads.formats.published import method_at

    try:
        name = "gemma4_assistant" if is_assistant(source) else method_at(source) or method_of_heads(source)
        name = "mtp" if name is None and holds_mtp_alone(source) else name
    except ModelError:
        name = None  # it is told of when it is loaded
    return DraftModel(model=source) if name is None else find(name).model_validate({"model": source})


def with_draft_model(speculation: Any, draft_model: str | PathLike[str] | None) -> Any:
    """The settings with a draft model that was given beside them."""
    if draft_model is None:
        return speculation
    if not isinstance(draft_model, str | PathLike) or not fspath(draft_model):
        remedy = "Give a local folder, a hub id, or a causal language model of transformers."
        raise InvalidParameterError("draft_model", draft_model, "neither a path nor a loaded model", remedy)
    draft_model, config = fspath(draft_model), SpeculationConfig.of(speculation)
    method = config.method
    if isinstance(method, Auto | Composition) and not method.methods:
        usual = usual_methods(drafter_at(draft_model), config.num_draft_tokens)
        in_order = with_chain(usual) if isinstance(method, Auto) else usual[::-1]  # a lookup comes first
        return config.replace(method=method.replace(methods=in_order))
    takes_one = isinstance(method, DraftModel) or getattr(method, "model", draft_model) is None  # and names none yet
    if method is not None and takes_one and not method.nested:
        return config.replace(method=method.replace(model=draft_model))
    whole = _with_draft(config, draft_model)
    if whole != config:
        return whole
    problem = f"speculation names method={config.name!r}"
    raise ContradictionError("draft_model", draft_model, problem, "Leave one of them out.")
