"""Options that follow from fields: of settings that declare a `Flag`, or of a dataclass; and commands that take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import reduce, wraps
from inspect import Parameter, Signature, signature
from operator import or_
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import typer

from outrider.config import Flag, Frozen, declared
from outrider.params import SamplingParams, StructuredOutputs

#: Models whose fields are left open where nothing is given: what the checkpoint says of them holds then.
_OPEN = (SamplingParams, StructuredOutputs)
#: What the name of an option begins with that turns something off.
_NEGATED = "no_"


@dataclass(frozen=True)
class Flags:
    """Marks a parameter of a command that gets the values of all options which set fields of these models, by name."""

    kinds: tuple[type[Frozen], ...]


def option(kind: type[Frozen], name: str) -> Any:
    """Makes the first option that sets a field, for a command that has no others of its model."""
    found = next(flag for field, flag in declared(kind, Flag) if field == name)
    return typer.Option(*found.names, help=found.help)


def with_options(ahead: int | None = None, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command options in place of the parameters that stand for several: those marked with `Flags`, and those whose
    type is a dataclass with fields that are annotated as options.

    Args:
        ahead: Options of each such parameter that come in its place, and the others behind all. None for all of them.
        defaults: Of this command, where they are not the declared ones.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        groups = {name: found for name, hint in hints.items() if (found := _group(hint, command.__name__)) is not None}
        shown, behind = list[Parameter](), list[Parameter]()
        for own in signature(command).parameters.values():
            if own.name not in groups:
                shown.append(own.replace(annotation=hints[own.name], kind=Parameter.KEYWORD_ONLY))
                continue
            parts = [each.replace(default=defaults.get(each.name, each.default)) for each in groups[own.name][0]]
            shown += parts[:ahead]
            behind += [] if ahead is None else parts[ahead:]

        usual = {each.name: each.default for each in (*shown, *behind) if each.default is not Parameter.empty}

        @wraps(command)
        def run(**given: Any) -> None:
            given = {**usual, **given}
            for name, (parts, make) in groups.items():
                given[name] = make(**{each.name: given.pop(each.name) for each in parts})
            command(**given)

        run.__signature__ = Signature([*shown, *behind])  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in (*shown, *behind)} | {"return": None}
        return run

    return decorate


def _group(hint: Any, verb: str) -> tuple[list[Parameter], Callable[..., Any]] | None:
    """Finds the options that a parameter stands for, and what makes its value of theirs; None for a single option."""
    if is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        return [_parameter(each.name, hints[each.name], each.default) for each in fields(hint)], cast(Any, hint)
    mark = next(iter(getattr(hint, "__metadata__", ())), None)
    return ([each for kind in mark.kinds for each in _flags(kind, verb)], _values) if isinstance(mark, Flags) else None


def _parameter(name: str, annotation: Any, default: Any) -> Parameter:
    default = Parameter.empty if default is MISSING else default
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _flags(kind: type[Frozen], verb: str) -> Iterator[Parameter]:
    """Yields the options with which a verb sets fields of a model, and of the models in them."""
    for name, field in kind.model_fields.items():
        for inner in get_args(field.annotation):
            if isinstance(inner, type) and issubclass(inner, Frozen):
                yield from _flags(inner, verb)
        for flag in field.metadata:
            if isinstance(flag, Flag) and verb in flag.verbs:
                usual = None if kind in _OPEN else field.default
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
