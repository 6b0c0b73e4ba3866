"""The results: the figures of every way in every cell, and the costs of rows. They are kept as JSON from run to run."""

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
    """The figures of one way in one cell. A figure is None where it cannot be known.

    Attributes:
        name: "draft_model k=3", or "PEER: mode" for a peer.
        peer: The peer to which the way belongs. None for a way of our own.
        tokens_per_second: The speed of decoding: the tokens after the first step, over the time after it.
        whole_tokens_per_second: All tokens over the whole time, prompts included.
        speedup: The speed of decoding over that of our plain decoding in the same round.
        whole_speedup: The same ratio with prompts included.
        time_to_first_token: Seconds until the first token.
        gap_p50, gap_p99: The median and the 99th percentile of the seconds between arrivals within a text.
        num_tokens: The tokens written in all rounds.
        tau: The mean acceptance length, 1 + accepted / verified drafts. Where a peer does not count these, it is the
            number of tokens per pass.
        tokens_per_pass: The tokens over the passes of the target, including passes without a draft.
        draft_length: The mean number of positions of a draft.
        rows: The mean number of rows of a pass that verified a draft: the draft tokens and one more.
        acceptance: The conditional acceptance over all positions together.
        acceptance_by_position: The conditional acceptance at each position. None where no draft reached the position.
        tries_by_position: The number of drafts behind each of these.
        expected_tokens: (1 - a^(K+1)) / (1 - a) for that acceptance and draft length.
        eta: speedup / tau.
        eta_limit: 1 / C for those rows. This is what eta would be if only the pass of the target cost time.
        shares: The shares of a step's time by phase: propose, forward, verify, host.
        peak_resident, peak_cuda: Peaks of memory in bytes.
        bandwidth_share: The bytes of weights read per second, over what the machine can read. Known for plain decoding in
            batch 1.
        repeated_8grams: The median over texts of the share of repeated 8-grams.
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
        """Whether this is our own plain decoding."""
        return self.peer is None and self.name == "plain"

    @property
    def drafted(self) -> bool:
        """Whether any draft was verified."""
        return self.tau is not None


class CellResult(BaseModel):
    """A cell, and its ways in the order of their turns.

    Attributes:
        cell: The cell.
        ways: The figures of every way that wrote all texts.
        dropouts: Who failed, and why.
        recipes: How to use each of our own ways, by its name.
    """

    model_config = ConfigDict(extra="forbid")

    cell: Cell
    ways: list[WayResult]
    dropouts: list[str] = []
    recipes: dict[str, Recipe] = {}

    def flatters(self, way: WayResult) -> bool:
        """Whether a way wrote greedy text that loops. Every proposer guesses it, so its figures must not be a headline."""
        return way.loops and self.cell.sampling == "greedy"

    @property
    def shown(self) -> list[WayResult]:
        """Our own ways, and for every peer its plain decoding and the best of its other modes."""
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
    """The costs of a model in one precision.

    Attributes:
        row_seconds: The seconds of a pass by its number of rows.
        weight_bytes: The bytes of weights that decoding a token reads. None for mixtures of experts.
        num_parameters: The number of parameters.
    """

    model_config = ConfigDict(extra="forbid")

    row_seconds: dict[int, float]
    weight_bytes: int | None
    num_parameters: int

    def row_costs(self) -> dict[int, float]:
        """C(n) = T(n) / T(1) for each number n of rows. Empty where T(1) is not known."""
        base = self.row_seconds.get(1)
        return {} if base is None else {n: seconds / base for n, seconds in self.row_seconds.items()}


class Outcome(StrEnum):
    """What an advice recommends."""

    PAYS = "pays"
    UNCLEAR = "unclear"
    PLAIN = "plain"
    LOOPS = "loops"


class Advice(BaseModel):
    """What pays in one precision, sampled one way, so many texts at a time.

    Attributes:
        group: "model, dtype, sampling, batch n".
        outcome: PAYS where a way pays; UNCLEAR where the range holds 1; PLAIN where plain decoding is faster; LOOPS where
            all text repeats itself and says nothing.
        way: The best way to draft. None where no way drafted text that counts.
        speedup: The speed of its decoding over plain decoding: the median over workloads, and the range over all rounds.
        never_drafted: The ways that never found anything to draft.
        text: All of this in sentences.
        python, command: A line of Python and a command line that use what is best. None where there is none.
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
    """All results of one machine with one set of versions.

    Attributes:
        machine: Hardware and versions.
        bandwidth: The bytes per second that the machine reads from memory.
        models: The costs of models, by "model, dtype".
        cells: The cells, by `Cell.key`.
        advice: What pays, for each group of cells.
        notes: What was left out, and why.
    """

    model_config = ConfigDict(extra="forbid")

    machine: dict[str, Any]
    bandwidth: float | None = None
    models: dict[str, ModelResult] = {}
    cells: dict[str, CellResult] = {}
    advice: list[Advice] = []
    notes: list[str] = []

    def note(self, text: str) -> None:
        """Add a note, unless it is there already."""
        if text not in self.notes:
            self.notes.append(text)

    @property
    def remarks(self) -> list[str]:
        """The notes, and who dropped out of a cell, each once."""
        return list(dict.fromkeys([*self.notes, *(said for found in self.cells.values() for said in found.dropouts)]))


class Store:
    """Results in a folder. They are written after every cell, so that an interrupted run loses at most one cell.

    Args:
        folder: The folder. None keeps nothing.
    """

    NAME = "results.json"

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def open(self, machine: dict[str, Any]) -> Results:
        """The results of earlier runs on the same machine. Results of another machine are renamed and left aside.

        Raises:
            InvalidParameterError: The folder cannot be written, or the file in it does not hold results.
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
            found.notes.clear()  # every run adds its own
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
        """Replace the file. An interruption leaves either the old file or the new one."""
        if self._folder is not None:
            unfinished = self._folder / f"{self.NAME}.{os.getpid()}"
            unfinished.write_text(results.model_dump_json(indent=1) + "\n", "utf-8")
            unfinished.replace(self._folder / self.NAME)
