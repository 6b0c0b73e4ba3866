"""RequestOptions: what a request carries beside its prompt, its sampling parameters and its speculation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RequestOptions:
    """Declared once, and handed from the caller to the engine as it is.

    Attributes:
        namespace: Whose request it is. Caches are shared within a namespace and never beyond it; namespaces take turns.
        prediction: Token ids that the caller expects the output to have, for the method `prediction`.
        priority: Among the requests of one namespace that wait, lower numbers go first.
        trace: Whether outputs tell of every round.
        streaming: Whether pieces of the text are kept for a stream.
        decoder_prompt: Token ids that the decoder begins with, where an encoder reads the prompt, from its start token on;
            empty for those that the model always begins with.
    """

    namespace: str | None = None
    prediction: tuple[int, ...] = ()
    priority: int = 0
    trace: bool = False
    streaming: bool = False
    decoder_prompt: tuple[int, ...] = ()


NO_OPTIONS = RequestOptions()
