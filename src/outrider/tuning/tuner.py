"""A whole tuning: replay the traffic, predict from what was written, recommend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from outrider.bench import machine
from outrider.bench.contestants import interleave, ours
from outrider.bench.figures import Spread
from outrider.bench.run import EncodedTask, Run
from outrider.bench.session import Progress
from outrider.bench.ways import Way
from outrider.doctor.measure import pass_seconds
from outrider.errors import OutriderError
from outrider.govern.costs import CostTable
from outrider.llm import LLM
from outrider.propose.auto import Auto
from outrider.propose.base import Proposer
from outrider.propose.draft_model import DraftModelProposer
from outrider.propose.speculation import SpeculationConfig
from outrider.tuning.prediction import Prediction, predict
from outrider.tuning.results import Recommendation, Row, TuningResults, best, recommend
from outrider.tuning.shadow import ShadowScorer
from outrider.tuning.traffic import Traffic

_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class TuningPlan:
    """How to tune.

    Attributes:
        concurrency: Texts at a time.
        temperature: With which texts are written, or were; 0 is greedy.
        num_texts: Most texts that are used.
        generate: Whether to replay and measure; otherwise recorded answers are scored alone.
    """

    concurrency: int
    temperature: float
    num_texts: int
    generate: bool


class Tuner:
    """Tunes a target for its traffic.

    Args:
        llm: The target, loaded without a method. Nobody else uses it.
        ways: To try, plain decoding first.
        traffic: The user's texts.
        plan: How to tune.
        progress: Shows how far it is.
    """

    def __init__(
        self, llm: LLM, ways: Sequence[Way], traffic: Traffic, plan: TuningPlan, progress: Progress | None = None
    ) -> None:
        self._llm = llm
        self._traffic = traffic
        self._plan = plan
        self._progress = progress or Progress()
        self._remarks: list[str] = []
        self._rounds = traffic.rounds(plan.concurrency, plan.num_texts)
        self._ways = [way for way in ways if self._usable(way)]

    def run(self) -> TuningResults:
        """Measure or predict every way.

        Raises:
            OutriderError: A text could not be written.
        """
        runs = self._replay(self._ways, self._rounds) if self._plan.generate else {}
        texts = self._written(runs) if runs else [text for texts in self._rounds for text in texts]
        predictions = self._predict(texts)
        rows = [self._row(way, predictions.get(way.name), runs) for way in self._ways]
        loaded = self._llm.engine.runner.loaded
        return TuningResults(
            model=loaded.name,
            dtype=str(loaded.dtype).removeprefix("torch."),
            machine=machine.describe(loaded.device),
            traffic=self._traffic.source,
            num_texts=len({text.name for text in texts}),
            bad_lines=list(self._traffic.bad),
            concurrency=self._plan.concurrency,
            temperature=self._plan.temperature,
            rows=rows,
            recommendation=self._recommend(rows),
            remarks=self._remarks,
        )

    # -- ways ----------------------------------------------------------------------------------------------------------

    def _usable(self, way: Way) -> bool:
        """Whether its proposer can be had. One that cannot is left out, and a remark says why."""
        try:
            self._proposer(way.config)
        except OutriderError as error:
            self._remarks.append(f"{way.name} was left out: {error}")
            return False
        return True

    def _proposer(self, config: SpeculationConfig) -> Proposer | None:
        if isinstance(config.method, Auto):
            self._llm.engine.governing.admit(config.method)
            return None
        return None if config.method is None else self._llm.proposers.get(config.method)

    # -- measuring -----------------------------------------------------------------------------------------------------

    def _replay(self, ways: Sequence[Way], rounds: Sequence[Sequence[EncodedTask]]) -> dict[str, list[Run]]:
        """Every way writes all rounds, in turn, after a few tokens to warm up."""
        contestants = [ours(self._llm, way, self._plan.temperature) for way in ways]
        self._progress.expect("replaying", len(ways) * (1 + len(rounds)))
        short = [[text.shortened(_WARM_UP_TOKENS) for text in rounds[0]]]
        interleave(short, contestants, lambda _: self._progress.advance())
        return interleave(rounds, contestants, lambda _: self._progress.advance())

    def _written(self, runs: dict[str, list[Run]]) -> list[EncodedTask]:
        """The texts with what plain decoding wrote behind them."""
        plain = runs[self._ways[0].name]
        pairs = [
            (text, ids)
            for texts, run in zip(self._rounds, plain, strict=True)
            for text, ids in zip(texts, run.token_ids, strict=True)
        ]
        return [replace(text, answer_ids=ids) for text, ids in pairs]

    # -- predicting ----------------------------------------------------------------------------------------------------

    def _predict(self, texts: Sequence[EncodedTask]) -> dict[str, Prediction]:
        """Of each way that text alone tells something of."""
        self._progress.expect("predicting", len(self._ways) + 1)
        context = int(fmean(len(text.prompt_ids) + text.max_tokens / 2 for text in texts))
        scorer = ShadowScorer(self._llm.engine, texts, self._plan.temperature)
        table = self._costs(context)
        self._progress.advance()
        found = {}
        for way in self._ways:
            proposer = self._proposer(way.config)
            shadow = None if isinstance(way.config.method, Auto) else scorer.score(way.config, proposer)
            if shadow is not None:
                found[way.name] = predict(shadow, way.name, table, self._plan.concurrency, context)
            self._progress.advance()
        return found

    def _costs(self, context: int) -> CostTable:
        """What passes of the target and of draft models cost behind such a context, by the names of ways."""
        timed: dict[int, dict[int, float]] = {}
        drafts = {}
        for way in self._ways:
            proposer = self._proposer(way.config)
            if isinstance(proposer, DraftModelProposer):
                if id(proposer) not in timed:
                    timed[id(proposer)] = pass_seconds(proposer.runner, context)
                drafts[way.name] = timed[id(proposer)]
        return CostTable(pass_seconds(self._llm.engine.runner, context), 0.0, drafts)

    # -- results -------------------------------------------------------------------------------------------------------

    def _row(self, way: Way, prediction: Prediction | None, runs: dict[str, list[Run]]) -> Row:
        row = Row(name=way.name, speculation=way.config.as_mapping())
        if prediction is not None:
            row.predicted, row.predicted_tokens = prediction.speedup, prediction.tokens
        if way.name in runs:
            own = runs[way.name]
            row.measured = _ratios(own, runs[self._ways[0].name])
            speeds = [run.tokens_per_second for run in own if run.tokens_per_second is not None]
            row.tokens_per_second = median(speeds) if speeds else None
            texts = sum(len(run.token_ids) for run in own)  # their first tokens come with the prompts
            passes = sum(run.num_passes or 0 for run in own) - texts
            row.measured_tokens = (sum(run.num_tokens for run in own) - texts) / max(passes, 1)
        return row

    def _recommend(self, rows: list[Row]) -> Recommendation:
        winner = best(rows)
        again = None
        if self._plan.generate and not winner.plain:
            pair = [self._ways[0], next(way for way in self._ways if way.name == winner.name)]
            runs = self._replay(pair, self._rounds)
            again = _ratios(runs[winner.name], runs[pair[0].name])
        return recommend(winner, again, self._plan.concurrency)


def _ratios(runs: list[Run], plain: list[Run]) -> Spread | None:
    """The speedup of each round."""
    pairs = [(run.tokens_per_second, base.tokens_per_second) for run, base in zip(runs, plain, strict=True)]
    return Spread.of([own / base for own, base in pairs if own is not None and base is not None])
