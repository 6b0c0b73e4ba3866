"""What a call may ask for beside a prompt and its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from outrider.arguments import check_namespace
from outrider.errors import InvalidParameterError
from outrider.propose.method import Method
from outrider.propose.speculation import SpeculationConfig

#: Any form that SpeculationConfig.of takes.
Speculation = SpeculationConfig | Method | Mapping[str, Any] | str


class CallOptions(TypedDict, total=False):
    """What a call may ask for beside a prompt and parameters.

    Attributes:
        speculation: Who drafts, in place of the LLM's own; "none" decodes plainly.
        namespace: Whose prompt it is: caches are shared within a namespace and never beyond it, and namespaces take turns.
        trace: Whether outputs tell of every round.
        prediction: A text, or token ids, that the caller expects the output to have, for the method `prediction`.
        priority: Among the requests of one namespace that wait, lower numbers go first. The usual number is 0.
    """

    speculation: Speculation | None
    namespace: str | None
    trace: bool
    prediction: str | Sequence[int] | None
    priority: int


@dataclass(frozen=True)
class CallSettings:
    """The same with its usual values, and whether pieces are wanted.

    Raises:
        InvalidParameterError: The namespace is no name, or the priority no number.
    """

    namespace: str | None = None
    trace: bool = False
    streaming: bool = False
    speculation: Speculation | None = None
    prediction: str | Sequence[int] | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        if not isinstance(self.priority, int) or isinstance(self.priority, bool):
            raise InvalidParameterError("priority", self.priority, "no whole number", "Use 0, or less to go first.")
