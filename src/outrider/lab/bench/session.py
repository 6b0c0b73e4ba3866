"""A whole run of the benchmark: it stores results after each cell, and goes on where it was ended."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from outrider.config import ROUNDED_ROWS, ModelConfig, default_model
from outrider.errors import InvalidParameterError, MissingExtraError, ModelError, OtherEngineError
from outrider.lab.bench.costs import CostPlan
from outrider.lab.bench.plan import Cell, CellPlan
from outrider.lab.bench.report import advise
from outrider.lab.bench.results import CellResult, ModelResult, Results, reads_too_fast, summarise
from outrider.lab.bench.settings import BenchSettings, PrecisionName
from outrider.lab.measure import machine
from outrider.lab.measure.agreement import measure_rounding
from outrider.lab.measure.decoding_config import DecodingConfig, precision, rounding, rounds_rows
from outrider.lab.measure.machine import LoadWatch
from outrider.lab.measure.progress import Progress
from outrider.lab.measure.widen_heads import wide_heads
from outrider.lab.measure.writing import AGAIN, Contestant, EncodedTask, Run, encoded_tasks, interleave, mean_length, ours
from outrider.lab.peers.base import Peer, PeerMode, PeerModels, PeerRun
from outrider.lab.peers.known import open_peer
from outrider.lab.prove.running import threads
from outrider.llm import LLM
from outrider.loading.configuration import read_context
from outrider.loading.sources import check_sources, usable_device
from outrider.propose.defaults import drafter_at
from outrider.propose.draft_model import DraftModel
from outrider.propose.eagle import Eagle3
from outrider.propose.row_heads import FolderMethod
from outrider.results import RequestStats
from outrider.widen import cache_folder, stretched, wide_target

_WARM_UP_TOKENS = 4
#: KV memory, in tokens, for the draft behind a text.
_DRAFT_TOKENS = 128
#: The rows that must fit behind the longest context.
_LEAST_ROOM = 64
#: The types whose products show the peak of the arithmetic.
_PRODUCT_DTYPES = (torch.bfloat16, torch.float32)


class Session:
    """One run of the benchmark: the plan of what is measured, and the cells that were, in the order of the plan."""

    def __init__(self, settings: BenchSettings, progress: Progress | None = None) -> None:
        check_sources(model=settings.model, draft_model=settings.draft_model)
        embedded = settings.model is None
        draft_model = settings.draft_model or (default_model("draft") if embedded else None)
        self._settings = settings
        self._progress = progress or Progress()
        self._name = settings.model or ("wide" if settings.wide else "embedded")
        self.plan = CellPlan(settings, self._name, draft_model)
        usable_device(settings.device)
        self._drafter = None if draft_model is None else drafter_at(draft_model)
        if draft_model is not None and isinstance(self._drafter, DraftModel):
            read_context(ModelConfig(model=draft_model))
        source = settings.model or default_model("target")  # the wide copy has the same tokenizer and the same context
        context = read_context(ModelConfig(model=source))
        self._texts = encoded_tasks(source, context, self.plan.tasks, self.plan.max_tokens)
        self._positions = _positions(settings, context)
        self._costs = CostPlan.of(settings, self._positions or context)
        self.measured: list[CellResult] = []

    def run(self) -> Results:
        """Measure every cell of the plan. A full run measures only those that are missing in its folder, and returns all
        results there; without a folder the results are those of this run."""
        settings, store, watch = self._settings, Store(self._settings.out), LoadWatch()
        with threads(settings.num_threads):
            device = usable_device(settings.device)
            results = store.open(machine.describe(device))
            if results.bandwidth is None or not results.products or not settings.full:
                self._measure_machine(device, results)
            self._note_choices(results)
            for dtype in self.plan.dtypes:
                self._measure_precision(dtype, results, store)
        results.note(f"load meanwhile: {watch.load()}")
        return results

    def _note_choices(self, results: Results) -> None:
        settings = self._settings
        if any(name.startswith("replay/") for name in self.plan.tasks):
            if not all(way.replays for way in self.plan.ways):
                results.note("replay leaves draft models out: their drafts pass the processor that forces the text")
            if settings.peers:
                results.note("replay leaves peers out: no text is forced on them")
        if self._positions is not None:
            results.note(
                f"passes were timed with the rotary range of the wide target stretched to {self._positions} positions; no "
                "text is that long"
            )

    def _measure_machine(self, device: torch.device, results: Results) -> None:
        """Measures what the machine reads and multiplies at best."""
        with self._one("memory bandwidth"):
            results.bandwidth = machine.read_bandwidth(device)
        with self._one("product of matrices"):
            results.products = {
                str(dtype).removeprefix("torch."): machine.product_peak(device, dtype) for dtype in _PRODUCT_DTYPES
            }

    # -- a precision ---------------------------------------------------------------------------------------------------

    def _measure_precision(self, dtype: PrecisionName, results: Results, store: Store) -> None:
        with self._one(f"loading {self._name}"):
            target = self._target(dtype)
            llm = self._load(target, dtype)
        computed = str(llm.engine.runner.loaded.dtype).removeprefix("torch.")
        actual = dtype if rounding(dtype) else computed + ROUNDED_ROWS * llm.engine.runner.loaded.rounds_rows
        self._note_rounding(llm, actual, results)
        stored = rounding(actual) or computed
        kind = stored[: len("int8")] if rounding(actual) else stored  # peers have one way to store weights of 8 or 4 bits
        draft, head = (
            self._drafter.model if isinstance(self._drafter, drafts) else None for drafts in (DraftModel, Eagle3)
        )
        models = PeerModels(target, draft, kind, torch.get_num_threads(), cache_folder() / "peers", head)
        with ExitStack() as stack:
            peers = self._open_peers(models, stack, results)
            model = self._model_result(llm, f"{self._name}, {actual}", results)
            for cell in self.plan.cells(actual, [f"{peer.name} {peer.version}" for peer in peers]):
                if not self._settings.full or cell.key not in results.cells:
                    contestants = self._contestants(cell, llm, peers)
                    results.cells[cell.key] = self._measure(cell, contestants, model, results)
                    results.advice = advise(results.cells.values())
                    store.save(results)
                self.measured.append(results.cells[cell.key])

    def _note_rounding(self, llm: LLM, dtype: str, results: Results) -> None:
        """Measures what rounding costs and gains, on the prompts of this run."""
        if rounding(dtype) is None and not rounds_rows(dtype):
            return
        with self._one("what rounding costs"):
            texts = [task.prompt_ids for tasks in self._texts.values() for task in tasks]
            try:
                found = str(measure_rounding(llm, texts))
            except ModelError as error:
                found = (
                    f"what rounding costs was not measured, since the model as it was cannot be loaded beside it: {error}"
                )
        results.note(f"{self._name}, {dtype}: {found}")

    def _open_peers(self, models: PeerModels, stack: ExitStack, results: Results) -> list[Peer]:
        """The peers that can run with these weights. A note says why the others cannot."""
        peers = []
        for name in self._settings.peer_names:
            try:
                peer = stack.enter_context(open_peer(name, models))
            except (MissingExtraError, InvalidParameterError) as error:
                results.note(f"{name} did not take part in {models.dtype}: {error.problem}. {error.remedy}")
                continue
            results.note(f"{name} {peer.version}: {peer.precision}")
            peers.append(peer)
        return peers

    def _target(self, dtype: PrecisionName) -> str:
        if self._settings.model is not None:
            return self._settings.model
        if not self._settings.wide:
            return default_model("target")
        name = precision(dtype)["dtype"]
        return wide_target("bfloat16" if name == "auto" else name)  # "auto" is the embedded checkpoint's own

    def _load(self, target: str, dtype: PrecisionName) -> LLM:
        """The target, with KV memory for the largest cell."""
        batch = max(cell.batch for cell in self.plan.cells("any"))
        longest = max(len(task.prompt_ids) + task.max_tokens for found in self._texts.values() for task in found)
        how = precision(dtype) if dtype == "auto" else {"activations": "none", **precision(dtype)}
        return LLM(
            target if self._positions is None else stretched(target, self._positions),
            speculation="none",
            **how,
            device=self._settings.device,
            max_num_seqs=batch,
            kv_cache_tokens=batch * (longest + _DRAFT_TOKENS),
            prefix_caching=False,
        )

    def _model_result(self, llm: LLM, key: str, results: Results) -> ModelResult:
        """The costs of the target. A full run measures them only where they are missing."""
        known = results.models.get(key)
        if known is None or not self._settings.full or not self._costs.covered(known):
            self._progress.expect("cost of passes", self._costs.num_rounds)
            known = self._costs.measure(llm.engine.runner, self._positions, self._progress.advance)
            results.models[key] = known
        return known

    # -- a cell --------------------------------------------------------------------------------------------------------

    def _contestants(self, cell: Cell, llm: LLM, peers: list[Peer]) -> list[Contestant[Run]]:
        found = [ours(llm, self._carried(way), cell.temperature) for way in self.plan.ways_of(cell)]
        for peer in peers if cell.peers else ():
            modes = peer.modes(full=self._settings.full, batch=cell.batch)
            found += [theirs(peer, mode, cell.temperature) for mode in modes]
        return found

    def _carried(self, way: DecodingConfig) -> DecodingConfig:
        """The way on the target at hand: heads of the embedded target are carried over to its wide copy."""
        method = way.config.method
        if not self._settings.wide or not isinstance(method, FolderMethod) or method.model is None:
            return way
        return replace(way, config=way.config.replace(method=method.replace(model=wide_heads(method.model))))

    def _measure(self, cell: Cell, contestants: list[Contestant[Run]], model: ModelResult, results: Results) -> CellResult:
        """Let every contestant write a few tokens to warm up, and then measure all rounds."""
        rounds = list(cell.rounds(self._texts[cell.workload]))
        dropouts: list[str] = []

        def dropped(contestant: Contestant[Run], error: OtherEngineError) -> None:
            dropouts.append(f"{contestant.name} dropped out of {cell.load}: {error.problem}")

        def advance(_: Contestant[Run]) -> None:
            self._progress.advance()

        self._progress.expect(cell.load, len(contestants) * (1 + len(rounds)))
        short = [task.shortened(_WARM_UP_TOKENS) for task in rounds[0]]
        warm = interleave([short], contestants, advance, dropped, on_again=self._progress.change)
        ready = [contestant for contestant in contestants if contestant.name in warm]
        runs = interleave(rounds, ready, advance, dropped, on_again=self._progress.change)
        for _ in range(AGAIN):
            if not reads_too_fast(runs, cell.batch, model, results.bandwidth):
                break
            with self._one("memory bandwidth"):  # a busy moment read less than weights are read now
                found = machine.read_bandwidth(usable_device(self._settings.device))
                results.bandwidth = max(results.bandwidth or 0.0, found)
        else:
            if reads_too_fast(runs, cell.batch, model, results.bandwidth):
                results.note("plain decoding seemed to read weights faster than torch reads memory, so no share is told")
        ways = summarise(
            ready, runs, cell.batch, model, results.bandwidth, mean_length([task for tasks in rounds for task in tasks])
        )
        greedy = cell.sampling == "greedy"
        recipes = {way.name: way.recipe(cell.model, cell.dtype, greedy=greedy) for way in self.plan.ways_of(cell)}
        return CellResult(cell=cell, ways=ways, dropouts=dropouts, recipes=recipes)

    @contextmanager
    def _one(self, what: str) -> Iterator[None]:
        self._progress.expect(what, 1)
        yield
        self._progress.advance()


def _positions(settings: BenchSettings, context: int) -> int | None:
    """Returns how many positions the wide target needs for the passes that were asked for. None where its own are
    enough."""
    if not settings.wide or not settings.contexts:
        return None
    needed = max(settings.contexts) + max((*settings.chunks, _LEAST_ROOM))
    return 1 << (needed - 1).bit_length() if needed > context else None


# --- Keeps results in a folder from run to run.


class Store:
    """Results in a folder, or nowhere. They are written after every cell, so that an interrupted run loses at most one
    cell."""

    NAME = "results.json"

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def open(self, machine: dict[str, Any]) -> Results:
        """The results of earlier runs on the same machine. Results of another machine are renamed and left aside."""
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
        names = (self._folder / f"results-{i}.json" for i in range(1, 10_000))
        aside = next(path for path in names if not path.exists())
        file.rename(aside)
        fresh = Results(machine=machine)
        fresh.note(f"results of another machine or of other versions were set aside as {aside.name}")
        return fresh

    def save(self, results: Results) -> None:
        """Replace the file. An interruption leaves either the old file or the new one. What other work disturbed is left
        out, so that the next run measures it again."""
        if self._folder is not None:
            results = results.believed
            unfinished = self._folder / f"{self.NAME}.{os.getpid()}"
            unfinished.write_text(results.model_dump_json(indent=1) + "\n", "utf-8")
            unfinished.replace(self._folder / self.NAME)


# --- Another engine as a contestant: one of its modes writes the texts of a round.


def theirs(peer: Peer, mode: PeerMode, temperature: float) -> Contestant[Run]:
    """A contestant for one mode of a peer."""

    def generate(tasks: Sequence[EncodedTask]) -> Run:
        (max_tokens,) = {task.max_tokens for task in tasks}  # the same for all but replays, which peers do not write
        prompts = [task.prompt_ids for task in tasks]
        return _as_run(peer.generate(mode, prompts, max_tokens=max_tokens, temperature=temperature, seed=None))

    return Contestant(f"{peer.name}: {mode.name}", generate, peer.name)


def _as_run(run: PeerRun) -> Run:
    """The run of a peer as a Run. Every pass of its target commits the accepted tokens and one more for each text. A peer
    may hand out several tokens at first without saying how many. Then one is assumed, which is in its favour."""
    accepted = run.num_accepted_tokens
    return Run(
        token_ids=run.texts,
        seconds=run.seconds,
        first_token_seconds=run.first_token_seconds,
        decode_tokens=run.decode_tokens,
        decode_seconds=run.decode_seconds,
        num_passes=None if accepted is None else max(1, run.num_tokens - accepted),
        drafts=RequestStats(num_draft_tokens=run.num_draft_tokens or 0, num_accepted_tokens=accepted or 0),
    )
