"""Options of a call beside its prompt and sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from outrider.propose.method import Method
from outrider.propose.speculation import SpeculationConfig

#: Any form that SpeculationConfig.of takes.
Speculation = SpeculationConfig | Method | Mapping[str, Any] | str


class TextOptions(TypedDict, total=False):
    """What a call may ask for beside a prompt, parameters and speculation.

    Attributes:
        namespace: Whose prompt it is: caches are shared within a namespace and never beyond it, and namespaces take turns.
        trace: Whether outputs tell of every round.
        prediction: A text, or token ids, that the caller expects the output to have, for the method `prediction`.
        priority: Among the requests of one namespace that wait, lower numbers go first. The usual number is 0.
        decoder_prompt: A text that the decoder goes on from, or token ids from its start token on, where an encoder reads
            the prompt.
    """

    namespace: str | None
    trace: bool
    prediction: str | Sequence[int] | None
    priority: int
    decoder_prompt: str | Sequence[int] | None


class CallOptions(TextOptions, total=False):
    """What a call may ask for beside a prompt and parameters.

    Attributes:
        speculation: Who drafts, in place of the LLM's own; "none" decodes plainly.
    """

    speculation: Speculation | None
