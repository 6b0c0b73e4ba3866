"""What a run measures, validated before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from outrider.bench.tasks import WORKLOADS
from outrider.config import DTypeName, QuantizationName
from outrider.errors import ContradictionError, InvalidParameterError
from outrider.validation import Frozen

SamplingName = Literal["greedy", "T=1"]
Batch = Annotated[int, Field(ge=1, le=64)]

#: How weights are held: a dtype, or rounded ones in bfloat16.
PrecisionName = DTypeName | QuantizationName


class BenchSettings(Frozen):
    """What to measure; empty tuples and None leave the choice to the plan.

    Attributes:
        model: Folder or hub id of the target; None takes the embedded one.
        draft_model: Its draft model; None takes the embedded one for the embedded target, and none for others.
        wide: Whether the target is the wide copy of the embedded one.
        dtypes: Precisions, each measured in turn; int8 is weight-only, over bfloat16.
        device: As LLM takes it.
        num_threads: Threads that compute; None leaves torch's.
        workloads: Of those built in.
        prompts: A JSONL file of the user's.
        spec_bench: A file in Spec-Bench's question format.
        replay: "copy" or a JSONL file of recorded texts.
        ways: In the form NAME or NAME:LENGTH.
        batches: Texts at a time, 1 to 64.
        samplings: Greedy, or temperature 1.
        num_prompts: Prompts of a workload, in rounds of the batch.
        max_tokens: Output tokens of every text.
        peers: Other engines by name, or "all".
        full: The whole matrix, resumed where an earlier run stopped.
        out: Folder for results; None writes none.

    Raises:
        InvalidParameterError: A value is outside its range.
        ContradictionError: Two settings cannot hold together.
    """

    model: str | None = Field(None, min_length=1, description="Use a local folder or a hub id.")
    draft_model: str | None = Field(None, min_length=1, description="Use a local folder or a hub id.")
    wide: bool = False
    dtypes: tuple[PrecisionName, ...] = Field((), description="Use auto, float64, float32, bfloat16, float16 or int8.")
    device: str | None = None
    num_threads: int | None = Field(None, ge=1, description="Use 1 or more.")
    workloads: tuple[str, ...] = ()
    prompts: Path | None = None
    spec_bench: Path | None = None
    replay: str | None = Field(None, min_length=1, description="Use copy, or a JSONL file.")
    ways: tuple[str, ...] = ()
    batches: tuple[Batch, ...] = Field((), description="Use 1 to 64.")
    samplings: tuple[SamplingName, ...] = Field((), description="Use greedy or T=1.")
    num_prompts: int | None = Field(None, ge=1, description="Use 1 or more.")
    max_tokens: int | None = Field(None, ge=2, description="Use 2 or more: the first token is not decoding.")
    peers: tuple[str, ...] = ()
    full: bool = False
    out: Path | None = None

    @model_validator(mode="after")
    def _settings_agree(self) -> BenchSettings:
        for name in self.workloads:
            if name not in WORKLOADS:
                raise InvalidParameterError("workload", name, "no such workload", f"Known: {', '.join(WORKLOADS)}.")
        if self.wide and self.model is not None:
            raise ContradictionError("wide", True, "it is a copy of the embedded target", "Leave MODEL or --wide out.")
        if self.full and self.out is None:
            raise ContradictionError("full", True, "its results need a place to be resumed from", "Add --out FOLDER.")
        return self

    @property
    def chooses_tasks(self) -> bool:
        """Whether the caller says what is to be written."""
        return bool(self.workloads or self.prompts or self.spec_bench or self.replay)
