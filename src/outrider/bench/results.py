"""What was found: figures of every way in every cell, and costs of rows; kept as JSON from run to run."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from outrider.bench.figures import Spread
from outrider.bench.plan import Cell
from outrider.bench.ways import Recipe
from outrider.errors import InvalidParameterError


class WayResult(BaseModel):
    """One way in one cell, medians over rounds; None for what cannot be known.

    Attributes:
        name: "draft_model k=3", or "PEER: mode" for a peer.
        peer: Whose it is; None for ours.
        tokens_per_second: Of decoding: tokens after the first step over the time after it.
        whole_tokens_per_second: Prompts included.
        speedup: Decoding, over our plain decoding in the same round.
        whole_speedup: The same, prompts included.
        time_to_first_token: Seconds.
        gap_p50, gap_p99: Seconds between arrivals within a text (inter-token latency).
        num_tokens: Written in all rounds.
        tau: Mean acceptance length: 1 + accepted / verified drafts; where a peer does not count those, tokens a pass.
        tokens_per_pass: Tokens over target passes; passes without a draft count here.
        draft_length: Positions of a draft, a mean.
        rows: A mean over passes that verified a draft: draft tokens and one more.
        acceptance: Conditional, all positions together.
        acceptance_by_position: Conditional; None where no draft got so far.
        tries_by_position: Drafts behind each of these.
        expected_tokens: (1 - a^(K+1)) / (1 - a) at that acceptance and draft length.
        eta: speedup / tau.
        eta_limit: 1 / C at those rows: what eta would be if only the target's pass cost time.
        shares: Of a step by phase: propose, forward, verify, host.
        peak_resident, peak_cuda: Bytes.
        bandwidth_share: Weights read a second over what the machine reads; plain decoding, batch 1.
        repeated_8grams: Median share over texts.
        loops: Whether that share is too large for a headline.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    peer: str | None = None
    tokens_per_second: Spread | None
    whole_tokens_per_second: Spread
    speedup: Spread | None = None
    whole_speedup: Spread | None = None
    time_to_first_token: Spread | None = None
    gap_p50: float | None = None
    gap_p99: float | None = None
    num_tokens: int
    tau: float | None = None
    tokens_per_pass: float | None = None
    draft_length: float | None = None
    rows: float | None = None
    acceptance: float | None = None
    acceptance_by_position: list[float | None] = []
    tries_by_position: list[int] = []
    expected_tokens: float | None = None
    eta: float | None = None
    eta_limit: float | None = None
    shares: dict[str, float] = {}
    peak_resident: int | None = None
    peak_cuda: int | None = None
    bandwidth_share: float | None = None
    repeated_8grams: float
    loops: bool

    @property
    def plain(self) -> bool:
        """Whether it is our own plain decoding."""
        return self.peer is None and self.name == "plain"

    @property
    def drafted(self) -> bool:
        """Whether a draft of one of our ways was ever verified."""
        return self.tau is not None


class CellResult(BaseModel):
    """A cell and its ways, in the order they took turns.

    Attributes:
        cell: What was compared.
        ways: Figures of those who came through.
        dropouts: Who did not, and why.
        recipes: How to use each of our ways, by name.
    """

    model_config = ConfigDict(extra="forbid")

    cell: Cell
    ways: list[WayResult]
    dropouts: list[str] = []
    recipes: dict[str, Recipe] = {}

    def flatters(self, way: WayResult) -> bool:
        """Whether this is greedy text that loops: every proposer guesses it, so that its figures are no headline."""
        return way.loops and self.cell.sampling == "greedy"

    @property
    def shown(self) -> list[WayResult]:
        """Ours, and of every peer its plain decoding and the best of its other modes."""
        return [way for way in self.ways if way.peer is None or way.name in self._chosen]

    @property
    def _chosen(self) -> set[str]:
        found = set()
        for peer in {way.peer for way in self.ways if way.peer is not None}:
            modes = [way for way in self.ways if way.peer == peer]
            plain = [way for way in modes if way.name.endswith(": plain")]
            others = [way for way in modes if way not in plain]
            best = max(others, key=lambda way: way.whole_tokens_per_second.median, default=None)
            found |= {way.name for way in (*plain, *([best] if best else ()))}
        return found


class ModelResult(BaseModel):
    """What a model in one precision costs, whatever it writes.

    Attributes:
        row_seconds: Of a pass, by rows.
        weight_bytes: Read to decode a token; None for mixtures of experts.
        num_parameters: All of them.
    """

    model_config = ConfigDict(extra="forbid")

    row_seconds: dict[int, float]
    weight_bytes: int | None
    num_parameters: int

    def row_costs(self) -> dict[int, float]:
        """C(n) = T(n) / T(1)."""
        base = self.row_seconds.get(1)
        return {} if base is None else {n: seconds / base for n, seconds in self.row_seconds.items()}


class Outcome(StrEnum):
    """What is to be done about drafts."""

    PAYS = "pays"
    UNCLEAR = "unclear"
    PLAIN = "plain"
    LOOPS = "loops"


class Verdict(BaseModel):
    """What pays in one precision, sampled one way, so many texts at a time.

    Attributes:
        group: "model, dtype, sampling, batch n".
        outcome: A way pays; the ranges hold 1; plain decoding is faster; or the text loops and says nothing.
        way: The best way to draft; None where none drafted text that counts.
        speedup: Its decoding over plain decoding: the median over workloads, and the range over all rounds.
        never_drafted: Ways that never found anything to draft.
        text: All of this in sentences.
        python, command: How to use what is best, as a line of Python and as a command line; None where there is none.
    """

    model_config = ConfigDict(extra="forbid")

    group: str
    outcome: Outcome
    way: str | None
    speedup: Spread | None
    never_drafted: list[str]
    text: str
    python: str | None
    command: str | None


class Results(BaseModel):
    """Everything found on one machine with one set of versions.

    Attributes:
        machine: Hardware and versions.
        bandwidth: Bytes a second read from memory.
        models: By "model, dtype".
        cells: By `Cell.key`.
        verdicts: What pays, by group of cells.
        notes: What was left out, and why.
    """

    model_config = ConfigDict(extra="forbid")

    machine: dict[str, Any]
    bandwidth: float | None = None
    models: dict[str, ModelResult] = {}
    cells: dict[str, CellResult] = {}
    verdicts: list[Verdict] = []
    notes: list[str] = []

    def note(self, text: str) -> None:
        """Say it once."""
        if text not in self.notes:
            self.notes.append(text)

    @property
    def remarks(self) -> list[str]:
        """Notes, and who dropped out of a cell, each once."""
        return list(dict.fromkeys([*self.notes, *(said for found in self.cells.values() for said in found.dropouts)]))


class Store:
    """Results in a folder, written after every cell, so that an interrupted run loses one cell at most.

    Args:
        folder: Where to; None keeps nothing.
    """

    NAME = "results.json"

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def open(self, machine: dict[str, Any]) -> Results:
        """What runs on the same machine left here. Another machine's results are set aside under another name.

        Raises:
            InvalidParameterError: The folder cannot be written, or what lies there are no results.
        """
        if self._folder is None:
            return Results(machine=machine)
        file = self._folder / self.NAME
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            found = Results.model_validate_json(file.read_text("utf-8")) if file.exists() else Results(machine=machine)
        except OSError as error:
            raise InvalidParameterError("out", str(self._folder), f"unusable ({error})", "Give a folder.") from None
        except (ValidationError, UnicodeDecodeError):
            raise InvalidParameterError(
                "out", str(file), "not the results of a run of this version", "Move it away, or give another folder."
            ) from None
        if found.machine == machine:
            found.notes.clear()  # every run says its own
            return found
        aside = self._aside()
        file.rename(aside)
        fresh = Results(machine=machine)
        fresh.note(f"results of another machine or of other versions were set aside as {aside.name}")
        return fresh

    def _aside(self) -> Path:
        assert self._folder is not None
        names = (self._folder / f"results-{i}.json" for i in range(1, 10_000))
        return next(path for path in names if not path.exists())

    def save(self, results: Results) -> None:
        """Replace what is there, whole or not at all."""
        if self._folder is not None:
            unfinished = self._folder / f"{self.NAME}.{os.getpid()}"
            unfinished.write_text(results.model_dump_json(indent=1) + "\n", "utf-8")
            unfinished.replace(self._folder / self.NAME)
