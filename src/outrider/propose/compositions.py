"""Methods made of methods: `merge` and `then` join drafts, and `auto` leaves the choice to the governor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, model_validator

from outrider.errors import ContradictionError, InputError, InvalidParameterError, ModelError
from outrider.propose.base import Proposer
from outrider.propose.settings import Method, ProposerContext, SpeculationConfig
from outrider.propose.tree import MAX_ROWS

# --- Methods made of methods: `merge` joins what its members draft into one tree, `then` lets one go on where another
# stopped.
#
# A composition has no proposer of its own. The engine asks its members in turns (`turns_of`), each as it asks a method
# that a request names alone. So faults, memory, what a member is shown and what is learnt of it are the member's own.


#: Methods with others inside them that may stand inside each other, the outermost included.
MAX_DEPTH = 4
#: Rows of a composition whose members are left open.
_USUAL_LENGTH = 16
#: Members of all compositions of one request together; each may keep a model and memory for its text.
MAX_MEMBERS = 8


def named(place: str, error: InputError | ModelError) -> InputError | ModelError:
    """Returns the same error with the place in the nesting before the name of its setting. What is `draft_model` beside a
    method is `model` inside it."""
    if isinstance(error, ModelError):
        return error.at(place)
    field = "model" if error.field == "draft_model" else error.field
    return type(error)(f"{place}.{field}", error.value, error.problem, error.remedy)


def as_members(values: Any) -> Any:
    """Whole settings from each entry of a list, in any form that `SpeculationConfig.of` takes; errors name the place."""
    if not isinstance(values, list | tuple):
        problem = "no list of methods"
        raise InvalidParameterError("methods", values, problem, 'Use a list like ["suffix", {"method": "draft_model"}].')
    found = []
    for place, value in enumerate(values):
        try:
            found.append(SpeculationConfig.of(value))
        except InputError as error:
            raise named(f"methods.{place}", error) from None
    return tuple(found)


class Composition(Method):
    """Settings of a method that is made of other methods.

    Attributes:
        methods: Its members, two or more. Each has settings of its own, except the rule: one rule holds for the whole
            method. Empty takes `suffix` and the LLM's own draft model, or `token_recycling` where it has none.
    """

    name: ClassVar[str] = "_composition"
    takes_tree: ClassVar[bool] = False
    instead_of_tree: ClassVar[str] = "Give trees to its methods."
    branches_freely: ClassVar[bool] = True

    methods: Annotated[tuple[SpeculationConfig, ...], BeforeValidator(as_members)] = ()

    @model_validator(mode="after")
    def _members_fit(self) -> Composition:
        if len(self.methods) == 1:
            problem = f"{self.name} needs two methods or more"
            raise InvalidParameterError("methods", len(self.methods), problem, "Name another one, or use the one alone.")
        for place, member in enumerate(self.methods):
            _check_member(f"methods.{place}", member)
            if member in self.methods[:place]:
                problem = f"methods.{self.methods.index(member)} has the same settings, and would draft the same"
                raise ContradictionError(f"methods.{place}", member.name, problem, "Leave one of them out, or use a tree.")
        check_depth("methods", self)
        check_number("methods", self.methods)
        return self

    @property
    def nested(self) -> Mapping[str, SpeculationConfig]:
        return {f"methods.{place}": member for place, member in enumerate(self.methods)}

    def with_nested(self, nested: Mapping[str, SpeculationConfig]) -> Self:
        return self.replace(methods=tuple(nested.values()))

    def usual_length(self) -> int:
        """Returns as many rows as its members have."""
        return min(MAX_ROWS, sum(member.num_draft_tokens for member in self.methods)) or _USUAL_LENGTH

    def build(self, context: ProposerContext) -> Proposer:
        """Nothing can be built: the engine asks the members."""
        remedy = "Use a method that has one proposer."
        raise InvalidParameterError("method", self.name, "it is no proposer of its own", remedy)


class Merge(Composition):
    """The drafts of several methods in one tree with shared prefixes; rows go to those whose tokens stand most often."""

    name: ClassVar[str] = "merge"

    def in_order(self) -> tuple[SpeculationConfig, ...]:
        """Its members in the order of their turns: first those who look their drafts up."""
        return tuple(sorted(self.methods, key=_draws))


class Then(Composition):
    """One method goes on where another stopped, inside one draft."""

    name: ClassVar[str] = "then"


@dataclass(frozen=True)
class MemberTurn:
    """One method's turn in a draft."""

    config: SpeculationConfig  # its settings
    # The earlier turns behind whose deepest token it drafts; without any, or where they drafted nothing, it begins at the
    # end of the text.
    behind: tuple[int, ...]
    pooled: bool  # whether it may also use rows that turns without drawn tokens have left over


def turns_of(configs: Sequence[SpeculationConfig]) -> tuple[MemberTurn, ...]:
    """The turns of settings that draft one behind the other, compositions resolved. In a merge those come first who look
    their drafts up: what rows they leave is of use to the others."""
    found: list[MemberTurn] = []
    _in_line(configs, (), found, pooled=False)
    return tuple(found)


def parts_of(config: SpeculationConfig) -> tuple[SpeculationConfig, ...]:
    """The settings themselves, or those of all members of a composition."""
    if not isinstance(config.method, Composition):
        return () if config.method is None else (config,)
    return tuple(turn.config for turn in turns_of([config]))


def placed_parts_of(config: SpeculationConfig, place: str = "") -> list[tuple[str, SpeculationConfig]]:
    """Returns the same with the place of each in the nesting, such as "methods.1"; empty for the settings themselves."""
    if not isinstance(config.method, Composition):
        return [(place, config)]
    dot = f"{place}." if place else ""
    return [part for own, member in config.method.nested.items() for part in placed_parts_of(member, dot + own)]


def _in_line(
    configs: Sequence[SpeculationConfig], behind: tuple[int, ...], found: list[MemberTurn], *, pooled: bool
) -> None:
    for config in configs:
        first = len(found)
        _add(config, behind, found, pooled=pooled)
        behind = (*behind, *range(first, len(found)))


def _add(config: SpeculationConfig, behind: tuple[int, ...], found: list[MemberTurn], *, pooled: bool) -> None:
    method = config.method
    if isinstance(method, Then):
        _in_line(method.methods, behind, found, pooled=True)
    elif isinstance(method, Merge):
        for member in method.in_order():
            _add(member, behind, found, pooled=True)
    elif method is not None:
        found.append(MemberTurn(config, behind, pooled))


def _draws(config: SpeculationConfig) -> bool:
    """Tells whether the draft, or the first part of it, may hold drawn tokens."""
    method = config.method
    if isinstance(method, Composition):
        return any(_draws(member) for member in method.methods)
    return method is not None and method.grows_from_probabilities


def _check_member(place: str, member: SpeculationConfig) -> None:
    check_drafts(place, member)
    if member.rule != "auto":
        problem = "one rule checks the whole draft"
        raise ContradictionError(f"{place}.rule", member.rule, problem, "Give the rule beside the outermost method.")


def check_drafts(place: str, member: SpeculationConfig) -> None:
    """Raise InvalidParameterError where settings inside others name no method that drafts by itself."""
    if member.method is None or member.engine_chooses:
        problem = "it drafts nothing" if member.method is None else "the engine chooses for requests alone"
        raise InvalidParameterError(f"{place}.method", member.name, problem, "Name a method that drafts.")


def check_number(field: str, members: Sequence[SpeculationConfig]) -> None:
    """Raise InvalidParameterError where there are too many methods, those inside compositions counted."""
    number = sum(len(parts_of(member)) for member in members)
    if number > MAX_MEMBERS:
        raise InvalidParameterError(field, number, "there are too many members in all", f"Use up to {MAX_MEMBERS}.")


def check_depth(field: str, method: Method) -> None:
    """Raise InvalidParameterError where methods stand too deep inside each other."""
    depth = _depth(method)
    if depth > MAX_DEPTH:
        problem = f"methods stand {depth} deep inside each other"
        raise InvalidParameterError(field, method.name, problem, f"Use up to {MAX_DEPTH}.")


def _depth(method: Method | None) -> int:
    if method is None or not method.nested:
        return 0
    return 1 + max(_depth(member.method) for member in method.nested.values())


# --- Auto: leaves the choice of method and length to the governor, step by step.


class Auto(Method):
    """The engine chooses by measurement, for each request and each step: one of several methods, its length, or none.

    Attributes:
        methods: What it may choose from, each with whole settings of its own, merged and chained methods too;
            num_draft_tokens is the longest draft that is considered. Empty takes `suffix`, the LLM's own draft model, and
            `then` of both. Where it has none, layers of its checkpoint that predict several tokens (`mtp`) take its place,
            or else it is `suffix` and `token_recycling`.
    """

    name: ClassVar[str] = "auto"
    default_num_draft_tokens: ClassVar[int] = 16
    takes_tree: ClassVar[bool] = False
    instead_of_tree: ClassVar[str] = "Give trees to its methods."

    methods: Annotated[tuple[SpeculationConfig, ...], BeforeValidator(as_members)] = ()

    @model_validator(mode="after")
    def _members_can_be_chosen(self) -> Auto:
        for place, member in enumerate(self.methods):
            check_drafts(f"methods.{place}", member)
        check_depth("methods", self)
        check_number("methods", self.methods)
        return self

    @property
    def candidates(self) -> tuple[SpeculationConfig, ...]:
        """Returns what the engine chooses from."""
        return self.methods

    @property
    def nested(self) -> Mapping[str, SpeculationConfig]:
        return {f"methods.{place}": member for place, member in enumerate(self.methods)}

    def with_nested(self, nested: Mapping[str, SpeculationConfig]) -> Self:
        return self.replace(methods=tuple(nested.values()))

    def build(self, context: ProposerContext) -> Proposer:
        """Nothing can be built: whoever asks wanted a member of a nested method.

        Raises:
            InvalidParameterError: Always.
        """
        raise InvalidParameterError("method", self.name, "the governor chooses for requests alone", "Name a method.")
