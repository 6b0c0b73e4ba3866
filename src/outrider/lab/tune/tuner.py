"""A whole tuning: replay the traffic, predict candidates from what was written, recommend one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from time import perf_counter
from typing import Any

from outrider.building import num_prediction_layers, usual_draft_rounding
from outrider.config import ModelConfig
from outrider.errors import OutriderError
from outrider.govern.costs import CostModel, CostTable
from outrider.lab.doctor.measure import pass_seconds
from outrider.lab.measure import machine
from outrider.lab.measure.decoding_config import DecodingConfig, parse_ways
from outrider.lab.measure.machine import LoadWatch
from outrider.lab.measure.progress import Progress, clock
from outrider.lab.measure.writing import EncodedTask, Run, believed_rounds, believed_speedup, interleave, mean_length, ours
from outrider.lab.tune.results import Recommendation, Row, TuningResults, best, nothing_known, recommend
from outrider.lab.tune.shadow import Shadow, ShadowScorer
from outrider.lab.tune.traffic import Traffic
from outrider.llm import LLM
from outrider.model.runner import ModelRunner
from outrider.propose.base import Proposer
from outrider.propose.compositions import Auto, Composition
from outrider.propose.defaults import SpeculationDefaults
from outrider.propose.draft_model import DraftModelProposer
from outrider.propose.eagle import Mtp
from outrider.propose.settings import SpeculationConfig

_WARM_UP_TOKENS = 4
#: Rounds that every way writes at least.
_LEAST_ROUNDS = 3


@dataclass(frozen=True)
class TuningPlan:
    """Says how to tune."""

    concurrency: int  # texts at a time
    temperature: float  # with which texts are written, or were; 0 is greedy
    num_texts: int  # most texts that are used
    generate: bool  # whether to replay and measure; otherwise recorded answers are scored alone


class Tuner:
    """Tunes a target for its traffic."""

    def __init__(
        self,
        llm: LLM,
        ways: Sequence[DecodingConfig],
        traffic: Traffic,
        plan: TuningPlan,
        progress: Progress | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._llm = llm
        self._traffic = traffic
        self._plan = plan
        self._progress, self._say = progress or Progress(), say
        self._remarks: list[str] = []
        self._doubts: list[str] = []
        self._rounds = traffic.rounds(plan.concurrency, plan.num_texts)
        self._progress.expect("loading drafters", len(ways))
        self._refused: dict[tuple[object, ...], OutriderError] = {}
        self._ways = [way for way in ways if self._usable(way)]

    def run(self) -> TuningResults:
        """Measure or predict every way."""
        watch = LoadWatch()
        if self._plan.generate:
            count = sum(map(len, self._rounds))
            self._say(
                f"{len(self._ways)} ways write {count} texts of up to {self._rounds[0][0].max_tokens} tokens, "
                f"{self._plan.concurrency} at a time, in {len(self._rounds)} rounds; the best one then writes them again"
            )
        runs = self._replay(self._ways, self._rounds) if self._plan.generate else {}
        texts = self._written(runs) if runs else [text for texts in self._rounds for text in texts]
        predictions = self._predict(texts)
        rows = [self._row(way, predictions.get(way.name), runs) for way in self._ways]
        recommendation = self._recommend(rows)
        self._remarks.append(f"load meanwhile: {watch.load()}")
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
            recommendation=recommendation,
            remarks=self._remarks,
        )

    # -- ways ----------------------------------------------------------------------------------------------------------

    def _usable(self, way: DecodingConfig) -> bool:
        """Tells whether its proposer can be had. One that cannot is left out, and a remark says why."""
        method = way.config.method
        drafter = (type(method), getattr(method, "model", None))
        try:
            if drafter in self._refused:  # to load it again would take as long, for the same answer
                raise self._refused[drafter]
            self._proposer(way.config)
        except OutriderError as error:
            if drafter[1] is not None:
                self._refused[drafter] = error
            self._remarks.append(f"{way.name} was left out: {error}")
            return False
        finally:
            self._progress.advance()
        return True

    def _proposer(self, config: SpeculationConfig) -> Proposer | None:
        self._llm.engine.load_method(config)
        if config.engine_chooses:
            return None
        proposers = self._llm.proposers.prepare(config)
        return proposers[0] if len(proposers) == 1 else None

    # -- measuring -----------------------------------------------------------------------------------------------------

    def _replay(self, ways: Sequence[DecodingConfig], rounds: Sequence[Sequence[EncodedTask]]) -> dict[str, list[Run]]:
        """Every way writes all rounds, in turn, after a few tokens to warm up. A way that is clearly slower than another
        one stops, and where one way alone is left nobody writes on."""
        contestants = [ours(self._llm, way, self._plan.temperature) for way in ways]
        self._progress.expect("warming up", len(ways))
        short = [[text.shortened(_WARM_UP_TOKENS) for text in rounds[0]]]
        interleave(short, contestants, lambda _: self._progress.advance(), on_again=self._progress.change)
        self._progress.expect("replaying", len(ways) * len(rounds))
        begun, plain = perf_counter(), ways[0].name

        def go_on(runs: Mapping[str, list[Run]]) -> list[str]:
            num_rounds = len(runs[plain])
            found = clearly_best(runs, plain) if num_rounds >= _LEAST_ROUNDS else list(runs)
            if num_rounds == 1 and len(rounds) > 1:
                left = (perf_counter() - begun) * (len(rounds) - 1)
                self._say(f"the first of {len(rounds)} rounds is over: the others take {clock(left)} at most")
            if len(found) == 1 and num_rounds < len(rounds):
                self._say(f"{found[0]} is clearly the best after {num_rounds} of {len(rounds)} rounds")
            going = [] if len(found) == 1 else [plain, *(name for name in found if name != plain)]
            before = sum(len(own) == num_rounds for own in runs.values())  # those who stopped earlier have fewer
            self._progress.change((len(going) - before) * (len(rounds) - num_rounds))
            return going

        runs = interleave(
            rounds, contestants, lambda _: self._progress.advance(), who_goes_on=go_on, on_again=self._progress.change
        )
        few = [name for name, own in runs.items() if len(own) < len(rounds)]
        if few:
            self._remarks.append(
                f"{len(few)} of {len(runs)} ways wrote fewer than {len(rounds)} rounds, once that was clear"
            )
        return runs

    def _written(self, runs: dict[str, list[Run]]) -> list[EncodedTask]:
        """The texts with what plain decoding wrote behind them."""
        plain = runs[self._ways[0].name]
        pairs = [
            (text, ids)
            for texts, run in zip(self._rounds, plain, strict=False)  # where the answer was clear there are fewer runs
            for text, ids in zip(texts, run.token_ids, strict=True)
        ]
        return [replace(text, answer_ids=ids) for text, ids in pairs]

    # -- predicting ----------------------------------------------------------------------------------------------------

    def _predict(self, texts: Sequence[EncodedTask]) -> dict[str, Prediction]:
        """Predicts the gain of each way that text alone tells something of."""
        self._progress.expect("predicting", len(self._ways) + 1)
        context = int(mean_length(texts))
        scorer = ShadowScorer(self._llm.engine, texts, self._plan.temperature)
        table = self._costs(context)
        self._progress.advance()
        found = {}
        for way in self._ways:
            proposer = self._proposer(way.config)
            several = way.config.engine_chooses or isinstance(way.config.method, Composition)
            shadow = None if several else scorer.score(way.config, proposer)
            if shadow is not None:
                found[way.name] = predict(shadow, way.name, table, self._plan.concurrency, context)
            self._progress.advance()
        return found

    def _costs(self, context: int) -> CostTable:
        """Returns what passes of the target and of draft models cost behind such a context, by the names of ways."""
        timed: dict[int, dict[int, float]] = {}
        drafts = {}
        for way in self._ways:
            proposer = self._proposer(way.config)
            if isinstance(proposer, DraftModelProposer):
                if id(proposer) not in timed:
                    timed[id(proposer)] = self._passes(proposer.runner, context)
                drafts[way.name] = timed[id(proposer)]
        return CostTable(self._passes(self._llm.engine.runner, context), 0.0, drafts)

    def _passes(self, runner: ModelRunner, context: int) -> dict[int, float]:
        """The times of passes. Where they cannot be believed, this is noted."""
        found, doubt = pass_seconds(runner, context)
        if doubt is not None:
            self._doubts.append(f"predictions were disturbed: {doubt}.")
            self._remarks.append(self._doubts[-1])
        return found

    # -- results -------------------------------------------------------------------------------------------------------

    def _row(self, way: DecodingConfig, prediction: Prediction | None, runs: dict[str, list[Run]]) -> Row:
        row = Row(name=way.name, speculation=way.config.as_mapping())
        if prediction is not None:
            row.predicted_tokens = prediction.tokens
            row.predicted = None if self._doubts else prediction.speedup
        if way.name in runs:
            own = runs[way.name]
            plain = runs[self._ways[0].name][: len(own)]
            row.measured = believed_speedup(own, plain)
            row.disturbed = not believed_rounds(own, plain)
            speeds = [run.tokens_per_second for run in own if run.tokens_per_second is not None]
            row.tokens_per_second = median(speeds) if speeds else None
            gained = [run.tokens_per_pass for run in own if run.tokens_per_pass is not None]
            row.measured_tokens = fmean(gained) if gained else None
        return row

    def _recommend(self, rows: list[Row]) -> Recommendation:
        winner = best(rows)
        if not self._plan.generate:
            return nothing_known(self._doubts[0]) if self._doubts else recommend(winner, None, self._plan.concurrency)
        disturbed = [row.name for row in rows if row.disturbed]
        if disturbed:
            return nothing_known(_impossible(disturbed))
        again = None
        if not winner.plain:
            pair = [self._ways[0], next(way for way in self._ways if way.name == winner.name)]
            runs = self._replay(pair, self._rounds)
            again = believed_speedup(runs[winner.name], runs[pair[0].name])
            if not believed_rounds(runs[winner.name], runs[pair[0].name]):
                return nothing_known(_impossible([winner.name]))
        return recommend(winner, again, self._plan.concurrency)


def clearly_best(runs: Mapping[str, list[Run]], plain: str) -> list[str]:
    """The ways that may still be the best: those whose best round is not slower than the worst one of another way."""
    most = len(runs[plain])
    spreads = {name: believed_speedup(own, runs[plain]) for name, own in runs.items() if len(own) == most}
    known = {name: spread for name, spread in spreads.items() if spread is not None}
    floor = max((spread.low for spread in known.values()), default=0.0)
    return [name for name in spreads if name not in known or known[name].high >= floor]


def _impossible(names: Sequence[str]) -> str:
    said = "more than its tokens a pass" if len(names) == 1 else "more than their tokens a pass"
    return f"{', '.join(names)} gained {said}, which cannot be: other work disturbed the measurement."


# --- Candidate settings of a tuning: methods, lengths and trees.


#: Ways that are tried unless others are asked for. Those with a draft model need one.
USUAL = (
    "draft_model:2",
    "draft_model:3",
    "draft_model:4",
    "draft_model:6",
    "draft_model:8",
    "draft_model:best_first:8",
    "ngram:5",
    "suffix:8",
    "suffix:16",
    "suffix-tree:16",
    "token_recycling:10",
    "auto",
)
#: Ways that are tried where the target's own files carry layers that predict several tokens.
_OF_PREDICTION_LAYERS = ("mtp:1", "mtp:2", "mtp:3")
#: Ways that are tried with a draft model of 4 bits, too, where its checkpoint has more.
_TRIED_WITH_4_BITS = ("draft_model k=3", "draft_model k=4")


def candidates(llm: LLM, names: Sequence[str], draft_model: str | None) -> list[DecodingConfig]:
    """The ways to try, plain decoding first. The draft model is for the ways that need one and name none."""
    target = llm.engine.runner.loaded
    carried = num_prediction_layers(target) > 0
    usual = [name for name in USUAL if draft_model is not None or not name.startswith("draft_model")]
    ways = parse_ways(names or [*(_OF_PREDICTION_LAYERS if carried else ()), *usual], draft_model)
    if carried and draft_model is None:  # what an engine chooses from to which nobody says who drafts
        auto = SpeculationDefaults.of(None, None, None).with_carried(Mtp.name).config
        ways = [replace(way, config=auto) if way.name == Auto.name else way for way in ways]
    like: dict[str, Any] = {"dtype": str(target.dtype).removeprefix("torch."), "device": str(target.device)}
    narrower = [way for way in ways if way.name in _TRIED_WITH_4_BITS and not names]  # none where a head drafts
    if draft_model is not None and narrower and usual_draft_rounding(ModelConfig(model=draft_model, **like)) == "int8":
        ways += map(_with_4_bits, narrower)
    return [replace(way, config=llm.resolve(way.config)) for way in ways]


def _with_4_bits(way: DecodingConfig) -> DecodingConfig:
    """Returns the same with a draft model of half the bytes, whose drafts may be refused more often."""
    assert way.config.method is not None
    method = way.config.method.replace(quantization="int4")
    return DecodingConfig(f"{way.name} int4", way.config.replace(method=method))


# --- Predicts speedups from shadow acceptance and the times of passes.


@dataclass(frozen=True)
class Prediction:
    """Holds what drafts are expected to be worth."""

    tokens: float  # tokens that a text gains in a step
    rows: float  # rows of a text in a step
    speedup: float  # over plain decoding


def predict(shadow: Shadow, name: str, table: CostTable, batch: int, context: int) -> Prediction:
    """The speedup that follows from what drafts would have been worth, by the governor's own model of costs."""
    costs = CostModel(table)
    plain = costs.step_seconds(batch, batch * context)
    step = costs.step_seconds(batch * shadow.rows_per_pass, batch * context)
    if shadow.propose_seconds is None:
        levels = shadow.levels / max(shadow.passes, 1e-9)
        step += levels * costs.draft_seconds(name, batch, 1)
    else:
        step += batch * shadow.propose_seconds / max(shadow.passes, 1e-9)
    return Prediction(shadow.tokens_per_pass, shadow.rows_per_pass, shadow.tokens_per_pass * plain / step)
