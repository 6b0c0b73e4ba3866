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
    from outrider.patching.generate import patch, unpatch
    from outrider.propose.auto import Auto
    from outrider.propose.compositions import Merge, Then
    from outrider.propose.methods.blockwise import Blockwise
    from outrider.propose.methods.cross_vocabulary import CrossVocabulary
    from outrider.propose.methods.dflash import DFlash
    from outrider.propose.methods.draft_model import DraftModel
    from outrider.propose.methods.eagle1 import Eagle1
    from outrider.propose.methods.eagle3 import Eagle3
    from outrider.propose.methods.early_exit import EarlyExit
    from outrider.propose.methods.exit_head import ExitHead
    from outrider.propose.methods.layer_skip import LayerSkip
    from outrider.propose.methods.lookahead import Lookahead
    from outrider.propose.methods.medusa import Medusa
    from outrider.propose.methods.mtp import Mtp
    from outrider.propose.methods.ngram import Ngram
    from outrider.propose.methods.peagle import PEagle
    from outrider.propose.methods.prediction import Prediction
    from outrider.propose.methods.staged import Staged
    from outrider.propose.methods.suffix import Suffix
    from outrider.propose.methods.token_recycling import TokenRecycling
    from outrider.propose.speculation import SpeculationConfig
    from outrider.stats import RequestStats
    from outrider.trace import RoundTrace

__version__ = "0.1.0"

_HOMES = {
    "AsyncLLM": "outrider.async_llm",
    "LLM": "outrider.llm",
    "SpeculationConfig": "outrider.propose.speculation",
    "Auto": "outrider.propose.auto",
    "Blockwise": "outrider.propose.methods.blockwise",
    "CrossVocabulary": "outrider.propose.methods.cross_vocabulary",
    "DFlash": "outrider.propose.methods.dflash",
    "DraftModel": "outrider.propose.methods.draft_model",
    "Eagle1": "outrider.propose.methods.eagle1",
    "Eagle3": "outrider.propose.methods.eagle3",
    "EarlyExit": "outrider.propose.methods.early_exit",
    "ExitHead": "outrider.propose.methods.exit_head",
    "LayerSkip": "outrider.propose.methods.layer_skip",
    "Medusa": "outrider.propose.methods.medusa",
    "Merge": "outrider.propose.compositions",
    "Mtp": "outrider.propose.methods.mtp",
    "Ngram": "outrider.propose.methods.ngram",
    "PEagle": "outrider.propose.methods.peagle",
    "Prediction": "outrider.propose.methods.prediction",
    "Staged": "outrider.propose.methods.staged",
    "Suffix": "outrider.propose.methods.suffix",
    "Then": "outrider.propose.compositions",
    "Lookahead": "outrider.propose.methods.lookahead",
    "TokenRecycling": "outrider.propose.methods.token_recycling",
    "OutriderError": "outrider.errors",
    "patch": "outrider.patching.generate",
    "unpatch": "outrider.patching.generate",
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
    "DFlash",
    "DraftModel",
    "Eagle1",
    "Eagle3",
    "EarlyExit",
    "ExitHead",
    "LayerSkip",
    "Logprob",
    "Lookahead",
    "Medusa",
    "Merge",
    "Mtp",
    "Ngram",
    "OutriderError",
    "PEagle",
    "Prediction",
    "RequestOutput",
    "RequestStats",
    "RoundTrace",
    "SamplingParams",
    "SpeculationConfig",
    "Staged",
    "StreamPiece",
    "StructuredOutputs",
    "Suffix",
    "Then",
    "TokenOrigin",
    "TokenRecycling",
    "patch",
    "unpatch",
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
