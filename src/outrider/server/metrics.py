"""Metrics for Prometheus: vLLM's names where the meaning is the same, names of our own elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from outrider.engine.engine import Engine
from outrider.engine.thread import Health
from outrider.params import CompletionOutput
from outrider.results import RequestStats
from outrider.server.tenants import Meter

#: The form in which Prometheus reads them.
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: vLLM's buckets, in seconds.
_LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)


class ServerMetrics:
    """Counts what there is to count, request by request, and read from the engine when somebody looks."""

    def __init__(self, model: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # as in vLLM: the time at which a series began is of no use here
        self._registry = CollectorRegistry()
        self._model = model
        self._engine = _EngineCollector(model)
        self._registry.register(self._engine)
        self._tenants = _TenantCollector(model)
        self._registry.register(self._tenants)
        ProcessCollector(registry=self._registry)
        self._ended = self._counter(
            "vllm:request_success", "Texts that have ended, by `finished_reason`.", "finished_reason"
        )
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Tokens of prompts, counted when the answer is whole.")
        self._seconds = self._histogram(
            "vllm:e2e_request_latency_seconds",
            "Seconds from a request to the end of its answer, of requests that were answered.",
            _LATENCY,
        )
        self._first = self._histogram(
            "outrider:stream_first_piece_seconds",
            "Seconds from a streamed request to its first piece of text, thoughts or a call.",
            _FIRST_TOKEN,
        )
        self._requests = self._counter("outrider:http_requests", "Requests by `path` and `status`.", "path", "status")
        text = "Requests that brought an API key, by `tenant` and `status`, 429 among them."
        self._tenant_requests = self._counter("outrider:tenant_requests", text, "tenant", "status")
        text = "How often SIGHUP had the profile read again, by `outcome`: used or refused."
        self._profiles = self._counter("outrider:profile_reads", text, "outcome")
        text = "Texts that were kept as records, by `tenant`."
        self._recorded = self._counter("outrider:recorded_texts", text, "tenant")
        text = "Texts that could not be kept as records, as on a full disk, by `tenant`."
        self._not_recorded = self._counter("outrider:unrecorded_texts", text, "tenant")

    def answered(self, path: str, status: int, seconds: float, tenant: str | None) -> None:
        """A request has ended, one way or another. Tenants are those of the keys, so that they are never too many."""
        if tenant is not None:
            self._tenant_requests.labels(self._model, tenant, str(status)).inc()
        self._requests.labels(self._model, path, str(status)).inc()
        if status == 200:
            self._seconds.labels(self._model).observe(seconds)

    def began(self, seconds: float) -> None:
        """A stream's first piece has come."""
        self._first.labels(self._model).observe(seconds)

    def wrote(self, num_prompt_tokens: int, outputs: list[CompletionOutput]) -> None:
        """An answer is whole."""
        self._prompt_tokens.labels(self._model).inc(num_prompt_tokens)
        for output in outputs:
            self._ended.labels(self._model, output.finish_reason).inc()

    def read_profile(self, outcome: str) -> None:
        """The profile was read again."""
        self._profiles.labels(self._model, outcome).inc()

    def recorded(self, tenant: str, num_texts: int) -> None:
        """Texts were kept."""
        self._recorded.labels(self._model, tenant).inc(num_texts)

    def not_recorded(self, tenant: str, num_texts: int) -> None:
        """Texts should have been kept, and could not be."""
        self._not_recorded.labels(self._model, tenant).inc(num_texts)

    def text(self, state: EngineState | None, meters: Mapping[str | None, Meter]) -> bytes:
        """All of it in Prometheus' text format.

        Args:
            state: Of the engine; None where it does not answer.
        """
        self._engine.state = state
        self._tenants.meters = {tenant: meter for tenant, meter in meters.items() if tenant is not None}
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ("model_name", *labels), registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ("model_name",), buckets=buckets, registry=self._registry)


@dataclass(frozen=True)
class EngineState:
    """Holds what the engine tells between two steps."""

    running: int  # sequences
    waiting: int  # sequences
    cache_usage: float  # share of the KV blocks that running sequences hold
    kept_states: int  # running states that the prefix cache keeps
    num_tokens: int  # output tokens, target passes, and their rows
    num_steps: int  # output tokens, target passes, and their rows
    num_rows: int  # output tokens, target passes, and their rows
    seconds: dict[str, float]  # time by phase of a step
    by_method: dict[str, RequestStats]  # counts of sequences that have ended
    num_faults: int  # requests that ended because something raised in a step
    pauses: dict[str, int]  # how often the proposer of a method was switched off
    num_users: dict[str, int]  # how many sequences the proposers of each method work for
    chosen: dict[tuple[str, int], int]  # where the engine chooses who drafts: rounds by method and number of draft tokens
    reasons: dict[str, int]  # the same rounds by reason
    health: Health  # of the engine

    @staticmethod
    def of(engine: Engine, health: Health) -> EngineState:
        """Returns the state of an engine that rests."""
        stats, scheduler, blocks = engine.stats, engine.scheduler, engine.runner.blocks
        return EngineState(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            cache_usage=1.0 - blocks.num_free / blocks.num_blocks,
            kept_states=0 if blocks.states is None else len(blocks.states),
            num_tokens=stats.num_committed_tokens,
            num_steps=stats.num_steps,
            num_rows=stats.num_rows,
            seconds=dict(stats.seconds),
            by_method={name: found.copy() for name, found in stats.by_method.items()},
            num_faults=stats.num_faults,
            pauses=engine.proposers.pauses,
            num_users=engine.proposers.num_users,
            chosen=dict(stats.chosen),
            reasons=dict(stats.reasons),
            health=health,
        )


class _TenantCollector(Collector):
    """Tells what tenants use, as metrics; nothing where there are no API keys."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.meters: dict[str, Meter] = {}

    def collect(self) -> Iterator[Metric]:
        labels = ("model_name", "tenant")
        texts = GaugeMetricFamily(
            "outrider:tenant_texts",
            "Texts that are written or wait, by `tenant`: what `max_concurrent` and `--max-queue` limit.",
            labels=labels,
        )
        tokens = CounterMetricFamily(
            "outrider:tenant_tokens",
            "Tokens of prompts and texts, by `tenant`: what `tokens_per_minute` limits.",
            labels=labels,
        )
        for tenant, meter in self.meters.items():
            texts.add_metric((self._model, tenant), meter.num_texts)
            tokens.add_metric((self._model, tenant), meter.num_tokens)
        yield texts
        yield tokens


class _EngineCollector(Collector):
    """The engine's state as metrics."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.state: EngineState | None = None

    def collect(self) -> Iterator[Metric]:
        if self.state is None:
            return
        yield from self._gauges(self.state)
        yield from self._totals(self.state)
        yield from self._speculation(self.state.by_method)
        yield from self._choices(self.state)
        yield from self._switched_off(self.state)

    def _gauges(self, state: EngineState) -> Iterator[Metric]:
        yield self._gauge("vllm:num_requests_running", "Texts that are written, each sample by itself.", state.running)
        yield self._gauge("vllm:num_requests_waiting", "Texts that wait, each sample by itself.", state.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV memory in use, 0 to 1.", state.cache_usage)
        text = "Running states that the prefix cache keeps; only models with such states have any."
        yield self._gauge("outrider:kept_states", text, state.kept_states)
        users = GaugeMetricFamily(
            "outrider:proposer_users",
            "Texts that proposers work for, by `method`; zero when nothing runs or waits.",
            labels=("model_name", "method"),
        )
        for method, count in state.num_users.items():
            users.add_metric((self._model, method), count)
        yield users

    def _totals(self, state: EngineState) -> Iterator[Metric]:
        yield self._total("vllm:generation_tokens", "Tokens of texts.", {(): state.num_tokens})
        yield self._total("outrider:target_passes", "Passes of the target.", {(): state.num_steps})
        yield self._total("outrider:target_rows", "Rows of these passes.", {(): state.num_rows})
        cached = sum(stats.num_cached_tokens for stats in state.by_method.values())
        text = "Prompt tokens that texts which have ended took from the prefix cache when they began."
        yield self._total("vllm:prefix_cache_hits", text, {(): cached})
        phases = {(phase,): seconds for phase, seconds in state.seconds.items()}
        yield self._total(
            "outrider:step_seconds",
            "Seconds of the engine by `phase`: schedule, propose, forward, verify, commit.",
            phases,
            "phase",
        )
        health = state.health
        yield self._total("outrider:broken_steps", "Steps that were broken off.", {(): health.num_broken_steps})
        yield self._total("outrider:engine_rebuilds", "How often the engine began anew.", {(): health.num_rebuilds})
        yield self._total("outrider:step_faults", "Requests that a fault in a step has ended.", {(): state.num_faults})
        preempted = sum(stats.num_preemptions for stats in state.by_method.values())
        yield self._total("vllm:num_preemptions", "Texts that lost their memory for a while.", {(): preempted})

    def _speculation(self, by_method: dict[str, RequestStats]) -> Iterator[Metric]:
        """Yields metrics of sequences that have ended, by method. vLLM has the same metrics without that label."""
        counts = {
            "vllm:spec_decode_num_drafts": ("num_drafts", "Drafts of texts that have ended, by `method`."),
            "vllm:spec_decode_num_draft_tokens": (
                "num_draft_tokens",
                "Draft tokens of texts that have ended, by `method`.",
            ),
            "vllm:spec_decode_num_accepted_tokens": (
                "num_accepted_tokens",
                "Draft tokens that entered the text, by `method`.",
            ),
            "outrider:proposer_faults": ("num_proposer_faults", "Rounds in which a proposer misbehaved, by `method`."),
        }
        for name, (field, text) in counts.items():
            found = {(method,): getattr(stats, field) for method, stats in by_method.items()}
            yield self._total(name, text, found, "method")
        places: dict[Any, float] = {
            (method, str(place)): count
            for method, stats in by_method.items()
            for place, count in enumerate(stats.accepted_per_position)
        }
        name, text = (
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that entered the text, by `method` and `position`.",
        )
        yield self._total(name, text, places, "method", "position")
        yield from self._by_part(by_method)
        yield self._lengths(by_method)

    def _by_part(self, by_method: dict[str, RequestStats]) -> Iterator[Metric]:
        """Yields metrics of members, and of the stages inside methods."""
        parts = {
            "outrider:member_draft_tokens": (
                "member",
                "drafted_by_method",
                "Draft tokens, by `method` and by its `member`: a method, or `forced` for what a structure forces.",
            ),
            "outrider:member_accepted_tokens": (
                "member",
                "accepted_by_method",
                "Of these, the tokens that entered the text.",
            ),
            "outrider:stage_passes": (
                "stage",
                "passes_by_stage",
                "Passes of the models of stages, counted for each text, by `method` and by `stage`: the methods from the "
                "outermost to the drafter of the stage, such as `staged.suffix`.",
            ),
            "outrider:stage_draft_tokens": (
                "stage",
                "drafted_by_stage",
                "Tokens that the drafters of stages guessed for these passes, by `method` and `stage`.",
            ),
            "outrider:stage_accepted_tokens": (
                "stage",
                "accepted_by_stage",
                "Of these, the tokens that entered the draft of the stage.",
            ),
        }
        for name, (label, field, text) in parts.items():
            found: dict[Any, float] = {
                (method, part): count
                for method, stats in by_method.items()
                for part, count in getattr(stats, field).items()
            }
            yield self._total(name, text, found, "method", label)

    def _choices(self, state: EngineState) -> Iterator[Metric]:
        """Yields metrics of the engine's choices, in rounds whose requests left it the choice."""
        chosen: dict[Any, float] = {(method, str(length)): count for (method, length), count in state.chosen.items()}
        text = "Rounds in which the engine chose who drafts, by `method` (none is plain) and `num_draft_tokens`."
        yield self._total("outrider:choices", text, chosen, "method", "num_draft_tokens")
        reasons: dict[Any, float] = {(reason,): count for reason, count in state.reasons.items()}
        words = (
            "The same rounds, by the `reason` of the choice: a draft `pays`, is `longer` than planned to measure it, or is "
            "a `trial`. A plain step is `plain` to measure it, or a draft would be a `loss`, or cost more than trials may "
            "(`saving`). `fixed`: there was no choice. `fault`: the choice failed."
        )
        yield self._total("outrider:choice_reasons", words, reasons, "reason")

    def _switched_off(self, state: EngineState) -> Iterator[Metric]:
        pauses: dict[Any, float] = {(method,): count for method, count in state.pauses.items()}
        text = "How often the proposer of a `method` was switched off. The series appears after the first time."
        yield self._total("outrider:proposer_switch_offs", text, pauses, "method")
        off = GaugeMetricFamily(
            "outrider:proposer_switched_off",
            "1 while the proposer of a `method` is switched off for its faults.",
            labels=("model_name", "method"),
        )
        for method in state.pauses:
            off.add_metric((self._model, method), float(method in state.health.switched_off))
        yield off

    def _lengths(self, by_method: dict[str, RequestStats]) -> Metric:
        text = "How many tokens of a draft entered the text, by `method`."
        family = HistogramMetricFamily("outrider:accepted_per_draft", text, labels=("model_name", "method"))
        for method, stats in by_method.items():
            below, buckets = 0, []
            for length, count in enumerate(stats.acceptance_histogram):
                below += count
                buckets.append((str(float(length)), below))
            family.add_metric((self._model, method), [*buckets, ("+Inf", below)], stats.num_accepted_tokens)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _total(self, name: str, text: str, values: dict[Any, float], *labels: str) -> Metric:
        family = CounterMetricFamily(name, text, labels=("model_name", *labels))
        for found, value in values.items():
            family.add_metric((self._model, *found), value)
        return family
