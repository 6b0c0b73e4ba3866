"""Auto: leaves the choice of method and length to the governor, step by step."""

from __future__ import annotations

from typing import ClassVar

from pydantic import model_validator

from outrider.errors import InvalidParameterError
from outrider.propose.base import Proposer
from outrider.propose.compositions import Composition
from outrider.propose.method import Method, ProposerContext
from outrider.propose.speculation import Members, SpeculationConfig


class Auto(Method):
    """The engine chooses by measurement, for each request and each step: one of several methods, its length, or none.

    Attributes:
        methods: What it may choose from, each with whole settings of its own; num_draft_tokens is the longest draft that is
            considered. Empty takes `suffix` and the LLM's own draft model, or `token_recycling` where
            it has none.
    """

    name: ClassVar[str] = "auto"
    default_num_draft_tokens: ClassVar[int] = 16
    takes_tree: ClassVar[bool] = False
    instead_of_tree: ClassVar[str] = "Give trees to its methods."

    methods: Members = ()

    @model_validator(mode="after")
    def _members_can_be_chosen(self) -> Auto:
        for place, member in enumerate(self.methods):
            if isinstance(member.method, Composition):
                problem = "the engine chooses among single methods"
                raise InvalidParameterError(f"methods.{place}.method", member.name, problem, "Name its members instead.")
        return self

    @property
    def candidates(self) -> tuple[SpeculationConfig, ...]:
        """What the engine chooses from."""
        return self.methods

    def build(self, context: ProposerContext) -> Proposer:
        """Nothing can be built: whoever asks wanted a member of a nested method.

        Raises:
            InvalidParameterError: Always.
        """
        raise InvalidParameterError("method", self.name, "the governor chooses for requests alone", "Name a method.")
