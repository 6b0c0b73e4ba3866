"""Outrider: lossless speculative decoding for any Hugging Face causal language model.

The public names, loaded on first use so that `import outrider` and `outrider --help` stay fast.
"""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` is not imported: it would take most of the time that `import outrider` takes
if TYPE_CHECKING:
    from typing import Any

    from outrider.config import SpeculationConfig
    from outrider.errors import OutriderError
    from outrider.llm import LLM
    from outrider.params import (
        CompletionOutput,
        Logprob,
        RequestOutput,
        RequestStats,
        SamplingParams,
        StreamPiece,
        StructuredOutputs,
        TokenOrigin,
    )

__version__ = "0.1.0"

_HOMES = {
    "LLM": "outrider.llm",
    "SpeculationConfig": "outrider.config",
    "OutriderError": "outrider.errors",
    **dict.fromkeys(
        (
            "SamplingParams",
            "StructuredOutputs",
            "RequestOutput",
            "CompletionOutput",
            "Logprob",
            "RequestStats",
            "StreamPiece",
            "TokenOrigin",
        ),
        "outrider.params",
    ),
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "Logprob",
    "OutriderError",
    "RequestOutput",
    "RequestStats",
    "SamplingParams",
    "SpeculationConfig",
    "StreamPiece",
    "StructuredOutputs",
    "TokenOrigin",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'outrider' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
