"""A whole run: for each precision the costs of rows, and then the cells of the plan. It stores results after each cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from outrider.bench import machine, row_costs
from outrider.bench.advice import advise
from outrider.bench.contestants import Contestant, interleave, ours, theirs
from outrider.bench.peers.base import Peer, PeerModels
from outrider.bench.peers.known_peers import PEERS, open_peer
from outrider.bench.plan import Cell, Plan
from outrider.bench.results import CellResult, ModelResult, Results, Store
from outrider.bench.run import EncodedTask
from outrider.bench.settings import BenchSettings, PrecisionName
from outrider.bench.summary import summarise
from outrider.bench.tasks import Task
from outrider.bench.widen import cache_folder, wide_target
from outrider.errors import InvalidParameterError, InvalidPromptError, MissingExtraError, OtherEngineError
from outrider.llm import LLM, default_model
from outrider.model.loader import check_sources, usable_device

_WARM_UP_TOKENS = 4
#: KV memory, in tokens, for the costs of rows: a context and the rows behind it.
_ROW_COST_TOKENS = 256


@dataclass(frozen=True)
class Progress:
    """The callbacks that show how far a run is.

    Attributes:
        expect: Called with the name of what comes next and its number of turns.
        advance: Called after each turn.
    """

    expect: Callable[[str, int], None] = lambda what, turns: None
    advance: Callable[[], None] = lambda: None


class Session:
    """One run of the benchmark.

    Args:
        settings: What to measure.
        progress: The callbacks that show how far the run is.

    Attributes:
        plan: What will be measured.
        measured: The cells of this run, in the order of the plan.

    Raises:
        InputError: A file cannot be read, or a way or a peer is unknown.
    """

    def __init__(self, settings: BenchSettings, progress: Progress | None = None) -> None:
        check_sources(model=settings.model, draft_model=settings.draft_model)
        embedded = settings.model is None
        draft_model = settings.draft_model or (default_model("draft") if embedded else None)
        self._peer_names = _peer_names(settings.peers)
        self._settings = settings
        self._draft_model = draft_model
        self._progress = progress or Progress()
        self._name = settings.model or ("wide" if settings.wide else "embedded")
        self.plan = Plan(settings, self._name, draft_model)
        self.measured: list[CellResult] = []

    def run(self) -> Results:
        """Measure every cell of the plan. A full run measures only those that are missing in its folder.

        Returns:
            All results in the folder, or those of this run where there is no folder.

        Raises:
            OutriderError: The folder cannot be used, a model cannot be loaded, or a prompt does not fit.
        """
        settings, store = self._settings, Store(self._settings.out)
        with _threads(settings.num_threads):
            device = usable_device(settings.device)
            results = store.open(machine.describe(device))
            if results.bandwidth is None or not settings.full:
                with self._one("memory bandwidth"):
                    results.bandwidth = machine.read_bandwidth(device)
            self._note_choices(results)
            for dtype in self.plan.dtypes:
                self._measure_precision(dtype, results, store)
        return results

    def _note_choices(self, results: Results) -> None:
        settings = self._settings
        if any(name.startswith("replay/") for name in self.plan.tasks):
            if not all(way.replays for way in self.plan.ways):
                results.note("replay leaves draft models out: their drafts pass the processor that forces the text")
            if settings.peers:
                results.note("replay leaves peers out: no text is forced on them")
        if settings.peers and any(cell.batch > 1 for cell in self.plan.cells("any")):
            results.note("peers write one text at a time, so they stand in the cells of batch 1")

    # -- a precision ---------------------------------------------------------------------------------------------------

    def _measure_precision(self, dtype: PrecisionName, results: Results, store: Store) -> None:
        with self._one(f"loading {self._name}"):
            target = self._target(dtype)
            llm = self._load(target, dtype)
            tasks = {name: [self._encoded(task, llm) for task in found] for name, found in self.plan.tasks.items()}
        actual = "int8" if dtype == "int8" else str(llm.engine.runner.loaded.dtype).removeprefix("torch.")
        models = PeerModels(target, self._draft_model, actual, torch.get_num_threads(), cache_folder() / "peers")
        with ExitStack() as stack:
            peers = self._open_peers(models, stack, results)
            model = self._model_result(llm, f"{self._name}, {actual}", results)
            for cell in self.plan.cells(actual, [f"{peer.name} {peer.version}" for peer in peers]):
                if not self._settings.full or cell.key not in results.cells:
                    rounds = list(cell.rounds(tasks[cell.workload]))
                    contestants = self._contestants(cell, llm, peers)
                    results.cells[cell.key] = self._measure(cell, rounds, contestants, model, results.bandwidth)
                    results.advice = advise(results.cells.values())
                    store.save(results)
                self.measured.append(results.cells[cell.key])

    def _open_peers(self, models: PeerModels, stack: ExitStack, results: Results) -> list[Peer]:
        """The peers that can run with these weights. A note says why the others cannot."""
        peers = []
        for name in self._peer_names:
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
        return wide_target("bfloat16" if dtype in ("auto", "int8") else dtype)  # "auto" is the embedded checkpoint's own

    def _load(self, target: str, dtype: PrecisionName) -> LLM:
        """The target, with KV memory for the largest cell. A text has hardly more tokens than bytes."""
        batch = max(cell.batch for cell in self.plan.cells("any"))
        texts = [task.prompt + (task.answer or "") for found in self.plan.tasks.values() for task in found]
        longest = max(len(text.encode()) for text in texts)
        return LLM(
            target,
            speculation="none",
            dtype="bfloat16" if dtype == "int8" else dtype,
            quantization="int8" if dtype == "int8" else None,
            device=self._settings.device,
            max_num_seqs=batch,
            kv_cache_tokens=_ROW_COST_TOKENS + batch * (longest + self.plan.max_tokens + 64),
            prefix_caching=False,
        )

    def _encoded(self, task: Task, llm: LLM) -> EncodedTask:
        """A task in the target's tokens. Raises InvalidPromptError where they do not fit into its context."""
        prompt = llm.encode(task.prompt)
        answer = None if task.answer is None else llm.encode(task.answer)
        length = self.plan.max_tokens if answer is None else len(answer)
        limit = llm.engine.runner.loaded.max_model_len
        if len(prompt) + length > limit:
            raise InvalidPromptError(
                f"{task.workload}, {task.name}",
                task.prompt,
                f"{len(prompt)} tokens and {length} to be written, in a context of {limit}",
                "Shorten it, or lower --max-tokens.",
            )
        return EncodedTask(task.name, prompt, length, answer)

    def _model_result(self, llm: LLM, key: str, results: Results) -> ModelResult:
        """The costs of the target. A full run measures them only where they are missing."""
        if self._settings.full and key in results.models:
            return results.models[key]
        rows, repeats = (row_costs.ALL, 15) if self._settings.full else (row_costs.USUAL, 5)
        self._progress.expect("cost of rows", repeats + 1)
        runner = llm.engine.runner
        model = runner.loaded.model
        results.models[key] = ModelResult(
            row_seconds=row_costs.row_costs(runner, rows, repeats, self._progress.advance),
            weight_bytes=runner.backend.weight_bytes(model) or machine.weight_bytes(model),
            num_parameters=sum(weight.numel() for weight in model.parameters()),
        )
        return results.models[key]

    # -- a cell --------------------------------------------------------------------------------------------------------

    def _contestants(self, cell: Cell, llm: LLM, peers: list[Peer]) -> list[Contestant]:
        found = [ours(llm, way, cell.temperature) for way in self.plan.ways_of(cell)]
        for peer in peers if cell.peers else ():
            found += [theirs(peer, mode, cell.temperature) for mode in peer.modes(full=self._settings.full)]
        return found

    def _measure(
        self,
        cell: Cell,
        rounds: list[list[EncodedTask]],
        contestants: list[Contestant],
        model: ModelResult,
        bandwidth: float | None,
    ) -> CellResult:
        """Let every contestant write a few tokens to warm up, and then measure all rounds."""
        dropouts: list[str] = []

        def dropped(contestant: Contestant, error: OtherEngineError) -> None:
            dropouts.append(f"{contestant.name} dropped out of {cell.load}: {error.problem}")

        def advance(_: Contestant) -> None:
            self._progress.advance()

        self._progress.expect(cell.load, len(contestants) * (1 + len(rounds)))
        short = [task.shortened(_WARM_UP_TOKENS) for task in rounds[0]]
        warm = interleave([short], contestants, advance, dropped)
        ready = [contestant for contestant in contestants if contestant.name in warm]
        runs = interleave(rounds, ready, advance, dropped)
        ways = summarise(ready, runs, cell.batch, model, bandwidth)
        greedy = cell.sampling == "greedy"
        recipes = {way.name: way.recipe(cell.model, cell.dtype, greedy=greedy) for way in self.plan.ways_of(cell)}
        return CellResult(cell=cell, ways=ways, dropouts=dropouts, recipes=recipes)

    @contextmanager
    def _one(self, what: str) -> Iterator[None]:
        self._progress.expect(what, 1)
        yield
        self._progress.advance()


def _peer_names(asked: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the peers. "all" stands for all that are known."""
    for name in asked:
        if name != "all" and name not in PEERS:
            raise InvalidParameterError("peers", name, "no such peer", f"Known: {', '.join(('all', *PEERS))}.")
    return tuple(PEERS) if "all" in asked else asked


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Let torch compute with this number of threads within the block."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
