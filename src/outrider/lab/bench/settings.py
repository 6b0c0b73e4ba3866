"""Settings of a benchmark run, validated before anything is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from outrider.config import QUANTIZATIONS, ROUNDED_ROWS, DTypeName, Frozen, QuantizationName
from outrider.errors import ContradictionError, InvalidParameterError
from outrider.lab.measure.tasks import LONG, LONG_WORKLOADS, WORKLOADS
from outrider.lab.peers.known import PEERS

SamplingName = Literal["greedy", "T=1"]
Batch = Annotated[int, Field(ge=1, le=64)]
Context = Annotated[int, Field(ge=1, le=131_072)]
Chunk = Annotated[int, Field(ge=1, le=4_096)]

ALL_PEERS = "all"

#: How weights may be held that rounded rows meet. Those in a dtype are quantised in their files.
_BESIDE_ROWS = (*QUANTIZATIONS, "auto", "bfloat16", "float32")
#: Rounded weights, and rows that are rounded before they meet them.
RoundedRowsName = Annotated[str, Field(pattern=rf"^({'|'.join(_BESIDE_ROWS)}){re.escape(ROUNDED_ROWS)}$")]
#: How weights are held: in a dtype, or quantized.
PrecisionName = DTypeName | QuantizationName | RoundedRowsName


class BenchSettings(Frozen):
    """Says what to measure. Empty tuples and None leave the choice to the plan."""

    #: Folder or hub id of the target. None takes the embedded one.
    model: str | None = Field(None, min_length=1, description="Use a local folder or a hub id.")
    #: Its draft model. None takes the embedded one for the embedded target, and none for other targets.
    draft_model: str | None = Field(None, min_length=1, description="Use a local folder or a hub id.")
    wide: bool = False  # whether the target is the wide copy of the embedded one
    #: The precisions, measured one after another. Rounded weights are used with bfloat16, and with "+a8" behind them rows
    #: are rounded to 8 bits, too; "auto+a8" is for files whose weights are quantised.
    dtypes: tuple[PrecisionName, ...] = Field(
        (), description="Use auto, float64, float32, bfloat16, float16, int8, int4, int4+a8, or another way to round."
    )
    device: str | None = None  # the device, as LLM takes it
    #: The number of threads that compute. None leaves torch's.
    num_threads: int | None = Field(None, ge=1, description="Use 1 or more.")
    workloads: tuple[str, ...] = ()  # names of built-in workloads. "long" stands for all that have long prompts.
    #: A file with prompts of the user, or with the questions of Spec-Bench, MT-bench or SPEED-Bench.
    prompts: Path | None = None
    #: "copy", or a JSONL file of recorded texts.
    replay: str | None = Field(None, min_length=1, description="Use copy, or a JSONL file.")
    ways: tuple[str, ...] = ()  # the ways to decode, in the form NAME, NAME:LENGTH or NAME=FOLDER:LENGTH
    batches: tuple[Batch, ...] = Field((), description="Use 1 to 64.")  # the numbers of texts at a time, 1 to 64
    samplings: tuple[SamplingName, ...] = Field((), description="Use greedy or T=1.")  # greedy, or temperature 1
    #: The number of prompts of a workload. They are written in rounds of the batch.
    num_prompts: int | None = Field(None, ge=1, description="Use 1 or more.")
    #: The output tokens of every text.
    max_tokens: int | None = Field(None, ge=2, description="Use 2 or more: the first token is not decoding.")
    #: The numbers of tokens behind which passes are timed.
    contexts: tuple[Context, ...] = Field((), description="Use 1 to 131072 tokens.")
    #: The numbers of prompt rows whose passes are timed, at the beginning of a text and behind each context.
    chunks: tuple[Chunk, ...] = Field((), description="Use 1 to 4096 rows.")
    peers: tuple[str, ...] = ()  # other engines by name, or "all"
    full: bool = False  # measure everything, and go on where an earlier run stopped
    quick: bool = False  # measure one workload, sampled, one short text at a time, where nothing else is asked for
    out: Path | None = None  # the folder for results. None writes no results.
    #: The address of a server that speaks OpenAI's API, which is measured instead of an engine here.
    bench_client: str | None = Field(None, pattern=r"^https?://", description="Use an address like http://127.0.0.1:8000.")

    @model_validator(mode="after")
    def _settings_agree(self) -> BenchSettings:
        _check_names("workload", self.workloads, (*WORKLOADS, *LONG_WORKLOADS, LONG))
        _check_names("peers", self.peers, (ALL_PEERS, *PEERS))
        if self.wide and self.model is not None:
            raise ContradictionError("wide", True, "it is a copy of the embedded target", "Leave MODEL or --wide out.")
        if self.full and self.quick:
            raise ContradictionError("quick", True, "a full run measures everything", "Leave --full or --quick out.")
        if self.full and self.out is None:
            raise ContradictionError("full", True, "its results need a place to be resumed from", "Add --out FOLDER.")
        self._check_client()
        return self

    def _check_client(self) -> None:
        """A server has its own model and settings."""
        own = ("draft_model", "wide", "dtypes", "device", "num_threads", "contexts", "chunks", "peers", "full", "replay")
        for name in own if self.bench_client is not None else ():
            if getattr(self, name):
                raise ContradictionError(name, getattr(self, name), "a server is measured as it is", "Leave it out.")

    @property
    def peer_names(self) -> tuple[str, ...]:
        """The names of the peers. "all" stands for all that are known."""
        return tuple(PEERS) if ALL_PEERS in self.peers else self.peers

    @property
    def chooses_tasks(self) -> bool:
        """Tells whether the caller chooses what is written."""
        return bool(self.workloads or self.prompts or self.replay)


def _check_names(field: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            what = field.removesuffix("s")
            raise InvalidParameterError(field, name, f"no such {what}", f"Known: {', '.join(known)}.")
