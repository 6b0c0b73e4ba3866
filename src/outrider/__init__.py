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
    from outrider.patching import patch, unpatch
    from outrider.propose.assistant import Gemma4Assistant
    from outrider.propose.compositions import Auto, Merge, Then
    from outrider.propose.cross_vocabulary import CrossVocabulary
    from outrider.propose.draft_model import DraftModel
    from outrider.propose.eagle import Eagle1, Eagle3, Mtp
    from outrider.propose.lookahead import Lookahead
    from outrider.propose.ngram import Ngram, Prediction
    from outrider.propose.own_layers import EarlyExit, ExitHead, LayerSkip
    from outrider.propose.parallel import DFlash, DSpark, PEagle
    from outrider.propose.recycling import TokenRecycling
    from outrider.propose.row_heads import Blockwise, Medusa
    from outrider.propose.settings import SpeculationConfig
    from outrider.propose.staged import Staged
    from outrider.propose.suffix import Suffix
    from outrider.results import RequestStats, RoundTrace

__version__ = "0.1.0"

_HOMES = {
    "AsyncLLM": "outrider.async_llm",
    "LLM": "outrider.llm",
    "SpeculationConfig": "outrider.propose.settings",
    "Auto": "outrider.propose.compositions",
    "Blockwise": "outrider.propose.row_heads",
    "CrossVocabulary": "outrider.propose.cross_vocabulary",
    "DFlash": "outrider.propose.parallel",
    "DSpark": "outrider.propose.parallel",
    "Gemma4Assistant": "outrider.propose.assistant",
    "DraftModel": "outrider.propose.draft_model",
    "Eagle1": "outrider.propose.eagle",
    "Eagle3": "outrider.propose.eagle",
    "EarlyExit": "outrider.propose.own_layers",
    "ExitHead": "outrider.propose.own_layers",
    "LayerSkip": "outrider.propose.own_layers",
    "Medusa": "outrider.propose.row_heads",
    "Merge": "outrider.propose.compositions",
    "Mtp": "outrider.propose.eagle",
    "Ngram": "outrider.propose.ngram",
    "PEagle": "outrider.propose.parallel",
    "Prediction": "outrider.propose.ngram",
    "Staged": "outrider.propose.staged",
    "Suffix": "outrider.propose.suffix",
    "Then": "outrider.propose.compositions",
    "Lookahead": "outrider.propose.lookahead",
    "TokenRecycling": "outrider.propose.recycling",
    "OutriderError": "outrider.errors",
    "patch": "outrider.patching",
    "unpatch": "outrider.patching",
    "RequestStats": "outrider.results",
    "RoundTrace": "outrider.results",
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
    "DSpark",
    "DraftModel",
    "Eagle1",
    "Eagle3",
    "EarlyExit",
    "ExitHead",
    "Gemma4Assistant",
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
                if not gc.get_freeze_count():  # they become old: the next search is that of new objects alone
                    gc.freeze()
                    gc.unfreeze()
                gc.enable()
    raise AttributeError(f"module 'outrider' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
