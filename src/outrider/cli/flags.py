"""Options that follow from fields: of settings that declare a `Flag`, or of a dataclass; and commands that take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cached_property, partial, reduce, update_wrapper
from importlib import import_module
from inspect import Parameter, Signature, signature
from operator import or_
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import typer

if TYPE_CHECKING:
    from outrider.config import Flag, Frozen

#: What the name of an option begins with that turns something off.
_NEGATED = "no_"


@dataclass(frozen=True)
class Flags:
    """Marks a parameter of a command that gets the values of all options which set fields of these models, by name."""

    kinds: tuple[str, ...]  # as "outrider.config:ModelConfig"; models are imported when a verb is asked for
    are_open: bool = False  # whether what is not given stays open, so that what the checkpoint says of it holds


def option(kind: str, name: str) -> Any:
    """Makes the first option that sets a field, for a command that has no others of its model."""
    from outrider.config import Flag, declared

    found = next(flag for field, flag in declared(_model(kind), Flag) if field == name)
    return typer.Option(*found.names, help=found.help)


def with_options(ahead: int | None = None, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command options in place of the parameters that stand for several: those marked with `Flags`, and those whose
    type is a dataclass with fields that are annotated as options.

    Args:
        ahead: Options of each such parameter that come in its place, and the others behind all. None for all of them.
    """
    return partial(_Command, ahead, defaults)


class _Command:
    """Finds out its options when they are asked for: the help of all verbs has no use for them."""

    def __init__(self, ahead: int | None, defaults: Mapping[str, Any], command: Callable[..., None]) -> None:
        update_wrapper(self, command, ("__module__", "__name__", "__qualname__", "__doc__"), ())
        self._command, self._ahead, self._defaults = command, ahead, defaults

    def __getattr__(self, name: str) -> Any:
        if name == "__signature__":
            return Signature(self._options)
        if name == "__annotations__":
            return {each.name: each.annotation for each in self._options} | {"return": None}
        raise AttributeError(name)

    def __call__(self, **given: Any) -> None:
        given = {each.name: each.default for each in self._options if each.default is not Parameter.empty} | given
        for name, (parts, make) in self._groups.items():
            given[name] = make(**{each.name: given.pop(each.name) for each in parts})
        self._command(**given)

    @cached_property
    def _hints(self) -> dict[str, Any]:
        return get_type_hints(self._command, include_extras=True)

    @cached_property
    def _groups(self) -> dict[str, tuple[list[Parameter], Callable[..., Any]]]:
        found = {name: _group(hint, self._command.__name__) for name, hint in self._hints.items()}
        return {name: group for name, group in found.items() if group is not None}

    @cached_property
    def _options(self) -> list[Parameter]:
        shown, behind = list[Parameter](), list[Parameter]()
        for own in signature(self._command).parameters.values():
            if own.name not in self._groups:
                shown.append(own.replace(annotation=self._hints[own.name], kind=Parameter.KEYWORD_ONLY))
                continue
            parts = self._groups[own.name][0]
            parts = [each.replace(default=self._defaults.get(each.name, each.default)) for each in parts]
            shown += parts[: self._ahead]
            behind += [] if self._ahead is None else parts[self._ahead :]
        return shown + behind


def _model(place: str) -> type[Frozen]:
    module, _, name = place.partition(":")
    return cast("type[Frozen]", getattr(import_module(module), name))


def _group(hint: Any, verb: str) -> tuple[list[Parameter], Callable[..., Any]] | None:
    """Finds the options that a parameter stands for, and what makes its value of theirs; None for a single option."""
    if is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        return [_parameter(each.name, hints[each.name], each.default) for each in fields(hint)], cast(Any, hint)
    mark = next(iter(getattr(hint, "__metadata__", ())), None)
    if not isinstance(mark, Flags):
        return None
    return [each for kind in mark.kinds for each in _flags(_model(kind), verb, are_open=mark.are_open)], _values


def _parameter(name: str, annotation: Any, default: Any) -> Parameter:
    default = Parameter.empty if default is MISSING else default
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _flags(kind: type[Frozen], verb: str, *, are_open: bool) -> Iterator[Parameter]:
    """Yields the options with which a verb sets fields of a model, and of the models in them."""
    from outrider.config import Flag, Frozen

    for name, field in kind.model_fields.items():
        for inner in get_args(field.annotation):
            if isinstance(inner, type) and issubclass(inner, Frozen):
                yield from _flags(inner, verb, are_open=are_open)
        for flag in field.metadata:
            if isinstance(flag, Flag) and verb in flag.verbs:
                usual = None if are_open else field.default
                yield _option(name, field.annotation, flag, usual if flag.default is ... else flag.default)


def _option(name: str, annotation: Any, flag: Flag, default: Any) -> Parameter:
    if annotation is bool:
        name = _NEGATED + name if default else name
        return _parameter(name, Annotated[bool, typer.Option(f"--{name.replace('_', '-')}", help=flag.help)], False)
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    kinds = dict.fromkeys(_kind(part) for part in (*parts, *([NoneType] if default is None else [])))
    return _parameter(name, Annotated[reduce(or_, kinds), typer.Option(*flag.names, help=flag.help)], default)


def _kind(part: Any) -> Any:
    """Tells how a value is given: a name as a text, which the settings check, and a list one by one."""
    kinds: dict[Any, Any] = {Literal: str, tuple: list[str], dict: str}
    return kinds.get(get_origin(part), part)


def _values(**given: Any) -> dict[str, Any]:
    """Names what was given as the fields are named."""
    return {name.removeprefix(_NEGATED): not value if name.startswith(_NEGATED) else value for name, value in given.items()}
