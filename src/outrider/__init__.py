"""Outrider: lossless speculative decoding for any Hugging Face causal language model.

The public names, loaded on first use so that `import outrider` and `outrider --help` stay fast.
"""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` is not imported: it would take most of the time that `import outrider` takes
if TYPE_CHECKING:
    from typing import Any

    from outrider.async_llm import AsyncLLM
    from outrider.errors import OutriderError
    from outrider.llm import LLM
    from outrider.params import (
        CompletionOutput,
        Logprob,
        RequestOutput,
        SamplingParams,
        StreamPiece,
        StructuredOutputs,
        TokenOrigin,
    )
    from outrider.propose.auto import Auto
    from outrider.propose.blockwise import Blockwise
    from outrider.propose.cross_vocabulary import CrossVocabulary
    from outrider.propose.draft_model import DraftModel
    from outrider.propose.early_exit import EarlyExit
    from outrider.propose.exit_head import ExitHead
    from outrider.propose.layer_skip import LayerSkip
    from outrider.propose.lookahead import Lookahead
    from outrider.propose.medusa import Medusa
    from outrider.propose.ngram import Ngram
    from outrider.propose.prediction import Prediction
    from outrider.propose.speculation import SpeculationConfig
    from outrider.propose.suffix import Suffix
    from outrider.propose.token_recycling import TokenRecycling
    from outrider.stats import RequestStats
    from outrider.trace import RoundTrace

__version__ = "0.1.0"

_HOMES = {
    "AsyncLLM": "outrider.async_llm",
    "LLM": "outrider.llm",
    "SpeculationConfig": "outrider.propose.speculation",
    "Auto": "outrider.propose.auto",
    "Blockwise": "outrider.propose.blockwise",
    "CrossVocabulary": "outrider.propose.cross_vocabulary",
    "DraftModel": "outrider.propose.draft_model",
    "EarlyExit": "outrider.propose.early_exit",
    "ExitHead": "outrider.propose.exit_head",
    "LayerSkip": "outrider.propose.layer_skip",
    "Medusa": "outrider.propose.medusa",
    "Ngram": "outrider.propose.ngram",
    "Prediction": "outrider.propose.prediction",
    "Suffix": "outrider.propose.suffix",
    "Lookahead": "outrider.propose.lookahead",
    "TokenRecycling": "outrider.propose.token_recycling",
    "OutriderError": "outrider.errors",
    "RequestStats": "outrider.stats",
    "RoundTrace": "outrider.trace",
    **dict.fromkeys(
        (
            "SamplingParams",
            "StructuredOutputs",
            "RequestOutput",
            "CompletionOutput",
            "Logprob",
            "StreamPiece",
            "TokenOrigin",
        ),
        "outrider.params",
    ),
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "Auto",
    "Blockwise",
    "CompletionOutput",
    "CrossVocabulary",
    "DraftModel",
    "EarlyExit",
    "ExitHead",
    "LayerSkip",
    "Logprob",
    "Lookahead",
    "Medusa",
    "Ngram",
    "OutriderError",
    "Prediction",
    "RequestOutput",
    "RequestStats",
    "RoundTrace",
    "SamplingParams",
    "SpeculationConfig",
    "StreamPiece",
    "StructuredOutputs",
    "Suffix",
    "TokenOrigin",
    "TokenRecycling",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import gc
        from importlib import import_module

        was_enabled = gc.isenabled()
        gc.disable()  # imports make a million objects that all stay: searching them takes a quarter of the time
        try:
            return getattr(import_module(_HOMES[name]), name)
        finally:
            if was_enabled:
                gc.enable()
    raise AttributeError(f"module 'outrider' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
