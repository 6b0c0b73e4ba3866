"""Auto: leaves the choice of method and length to the governor, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import BeforeValidator, model_validator

from outrider.errors import InvalidParameterError
from outrider.propose.base import Proposer
from outrider.propose.compositions import as_members, check_depth, check_drafts, check_number
from outrider.propose.method import Method, ProposerContext
from outrider.propose.speculation import SpeculationConfig


class Auto(Method):
    """The engine chooses by measurement, for each request and each step: one of several methods, its length, or none.

    Attributes:
        methods: What it may choose from, each with whole settings of its own, merged and chained methods too;
            num_draft_tokens is the longest draft that is considered. Empty takes `suffix` and the LLM's own draft model, or
            `token_recycling` where it has none.
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
        """What the engine chooses from."""
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
