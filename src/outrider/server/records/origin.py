"""Where a server's texts come from: its target, and the parameters of requests that bring none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from outrider.errors import UnsupportedModelError
from outrider.heads.checkpoint import Witness
from outrider.llm import LLM
from outrider.model.target import Target
from outrider.train.manifest import DataSettings, TargetFacts
from outrider.train.origin import target_facts, target_witness

#: The share of the prompts that trainings keep for measurements: more than of data that are made, since there may be few.
_HELD_OUT = 0.1


@dataclass(frozen=True)
class Origin:
    """Where texts come from.

    Attributes:
        facts: Of the target.
        witness: Its hidden states for a fixed text.
        settings: How it writes where a request does not say.
    """

    facts: TargetFacts
    witness: Witness
    settings: DataSettings

    @classmethod
    def of(cls, llm: LLM) -> Self:
        """The origin of what a target writes.

        Raises:
            UnsupportedModelError: It has an encoder, so that a prompt is no part of its text.
        """
        loaded, usual = llm.engine.runner.loaded, llm.default_params
        if loaded.encoder is not None:
            problem = "its texts cannot be recorded, since an encoder reads the prompts"
            raise UnsupportedModelError(loaded.name, problem, "Leave --record out.")
        settings = DataSettings(
            max_tokens=loaded.max_model_len,
            temperature=usual.temperature,
            top_k=max(0, usual.top_k),
            top_p=usual.top_p,
            held_out=_HELD_OUT,
        )
        witness = llm.between_steps(lambda engine: target_witness(Target(engine.runner)))
        return cls(target_facts(loaded), witness, settings)
