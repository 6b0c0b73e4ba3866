"""Service: passes requests from the routes to the engine, within limits."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from outrider.async_llm import AsyncLLM, AsyncStream
from outrider.engine.engine import Engine
from outrider.engine.thread import Health
from outrider.errors import InvalidParameterError, UnsupportedParameterError
from outrider.loading.templates import TemplateLimits
from outrider.params import RequestOutput
from outrider.propose.settings import SpeculationConfig
from outrider.server.chat import SystemPrompts, answer_schema, blamed, forces_calls
from outrider.server.errors import ApiError, api_error, log
from outrider.server.lifecycle import Call
from outrider.server.metrics import EngineState, ServerMetrics
from outrider.server.recorder import Origin, Recorder, RecordFolder
from outrider.server.requests import AllowedMethods, Job, JobMaker, check_values, field_names
from outrider.server.schemas import ChatRequest, CommonRequest
from outrider.server.settings import ServerSettings
from outrider.server.shapes import Shape
from outrider.server.streams import Deadlines
from outrider.server.tenants import ApiKeys, Meter

S = TypeVar("S", bound=Shape)

#: Bytes of a body that is read at once, which takes a few milliseconds.
_READ_AT_ONCE = 64 * 2**10
#: How long it may take to clear away what was cut off at the end.
_CLEARING_SECONDS = 5.0


@dataclass(frozen=True)
class ModelFacts:
    """Holds what does not change while the server runs."""

    longest: int  # longest text that the model takes and that there is memory for
    max_num_seqs: int  # sequences that run at a time
    vocab_size: int  # token ids that the model knows


class Service:
    """The engine as the routes see it.

    Args:
        records: Where texts of tenants that allow it are kept; None for nowhere.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        settings: ServerSettings,
        allowed: AllowedMethods,
        keys: ApiKeys,
        records: RecordFolder | None = None,
    ) -> None:
        self.engine, self.settings, self.allowed, self.keys = engine, settings, allowed, keys
        llm = engine.llm
        runner, config = llm.engine.runner, llm.engine.scheduler.config
        capacity = runner.blocks.num_blocks * runner.blocks.block_size
        longest = min(runner.loaded.max_model_len, capacity)
        self.facts = ModelFacts(longest, config.max_num_seqs, runner.loaded.vocab_size)
        self.jobs = JobMaker(
            llm.prompts,
            llm.default_params,
            self.facts.longest,
            allowed,
            settings,
            self.facts.vocab_size,
            runner.loaded.text_start,
        )
        self.metrics = ServerMetrics(settings.model_name)
        self.recorder = None if records is None else Recorder(records, keys.record_budgets, Origin.of(llm), self.metrics)
        self.deadlines = Deadlines()
        self.draining = False
        llm.prompts.template_limits = TemplateLimits(settings.template_seconds, settings.template_mib)
        llm.engine.scheduler.tenants.weights = engine.preparing.turns.weights = keys.weights
        self._meters: dict[str | None, Meter] = {}
        self._system_prompts: defaultdict[str | None, SystemPrompts] = defaultdict(SystemPrompts)

    @property
    def health(self) -> Health:
        """Returns how the engine has fared."""
        return self.engine.llm.health

    @property
    def status(self) -> str:
        """ok, stopping, hanging where a step does not come to its end, or dead where the engine's thread has ended."""
        if not self.health.alive:
            return "dead"
        if self.engine.llm.busy_seconds > self.settings.step_seconds:
            return "hanging"
        return "stopping" if self.draining else "ok"

    def meter(self, tenant: str | None) -> Meter:
        """Returns what a tenant uses. There are as many as the tenants of the keys, so they are never forgotten."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers={"Connection": "close"})
        if tenant not in self._meters:
            self._meters[tenant] = Meter(self.keys.limits(tenant), self._max_texts)
        return self._meters[tenant]

    def watch_system_prompt(self, asked: CommonRequest, call: Call) -> None:
        """Warn once where a tenant's system prompt changes within, so that what follows is computed for each request."""
        if change := self._system_prompts[call.tenant].change(asked):
            facts = {"request_id": call.id, **change, "remedy": "Put what changes at the end of the conversation."}
            log("a system prompt changes, and the prefix cache ends there", facts, logging.WARNING)

    @property
    def num_texts(self) -> int:
        """Texts that are written or wait."""
        return sum(meter.num_texts for meter in self._meters.values())

    @property
    def is_busy(self) -> bool:
        """Tells whether anybody is being answered."""
        return self.num_texts > 0 or self.deadlines.num_open > 0

    @property
    def is_full(self) -> bool:
        """Tells whether as many texts wait as the queue of one tenant holds."""
        return self.num_texts >= self._max_texts

    @property
    def _max_texts(self) -> int:
        return self.facts.max_num_seqs + self.settings.max_queue

    async def read(self, read: Callable[[bytes], S], call: Call) -> S:
        """Returns what the body of a request says. A large body is read in another thread, when it is the tenant's turn."""
        body = await call.body(self.settings)
        check_values(body, self.settings.max_body_values)
        if len(body) <= _READ_AT_ONCE:
            return read(body)
        return await self.engine.prepared(call.tenant, partial(read, body))

    async def job(self, asked: CommonRequest, tenant: str | None) -> Job:
        """Returns what a request asks for, ready for the engine."""
        try:
            return await self.engine.prepared(tenant, partial(self.jobs.make, asked, tenant))
        except Exception as error:
            raise api_error(error, field_names(asked)) from error

    def draft_with(self, asked: SpeculationConfig) -> None:
        """Let these settings draft for later requests that do not say; those that are prepared already keep theirs."""
        llm = self.engine.llm
        allowed = self.allowed.with_usual(llm.resolve(asked))
        llm.change_speculation(allowed.usual)
        self.allowed, self.jobs = allowed, replace(self.jobs, allowed=allowed)

    async def write(self, job: Job) -> list[RequestOutput]:
        """All texts of a job, together. Whoever cancels this ends them."""
        tasks = [
            asyncio.create_task(self.engine.generate(list(prompt.token_ids), job.params, **job.options()))
            for prompt in job.prompts
        ]
        try:
            return list(await asyncio.gather(*tasks))
        except Exception as error:
            raise await self._refusal(job, error) from error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def begin(self, job: Job) -> list[AsyncStream]:
        """The streams of a job, which the engine has taken; whoever gets them closes them."""
        options = job.options()
        streams = [self.engine.stream(list(prompt.token_ids), job.params, **options) for prompt in job.prompts]
        try:
            for stream in streams:
                await stream.begin()
        except BaseException as error:
            await close(streams)
            if isinstance(error, Exception):
                raise await self._refusal(job, error) from error
            raise
        return streams

    async def _refusal(self, job: Job, error: Exception) -> ApiError:
        """The answer to an error, in the words of the request."""
        asked, grammars = job.asked, self.engine.llm.engine.grammars
        if not isinstance(error, InvalidParameterError | UnsupportedParameterError) or error.field != "structured_outputs":
            return api_error(error, field_names(asked))
        if isinstance(asked, ChatRequest) and (forces_calls(asked) or answer_schema(asked) is not None):
            error = await self.engine.prepared(job.namespace, partial(blamed, asked, error, grammars.start))
        return api_error(error, field_names(asked))

    async def end(self) -> str:
        """Let the engine go, once the last texts have. What is told, and logged, is whether they have left anything behind:
        "agree", or what the books of the engine say."""
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLEARING_SECONDS):
                while self.num_texts:
                    await asyncio.sleep(0.01)
        if self.recorder is not None:
            await self.recorder.close()
        try:
            await asyncio.to_thread(self.engine.llm.between_steps, Engine.check_rest)
            books = "agree"
        except AssertionError as error:
            books = str(error)
        log("ended", {"books": books}, logging.INFO if books == "agree" else logging.ERROR)
        await self.engine.close()
        return books

    async def metrics_text(self) -> bytes:
        """All metrics; waits for the end of the step that is under way. An engine that hangs or is dead tells nothing."""
        state = await asyncio.to_thread(self._state) if self.status in ("ok", "stopping") else None
        return self.metrics.text(state, self._meters)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError where a request names another model."""
        if name is not None and name != self.settings.model_name:
            problem = f"the model {name!r} is not served here. Use {self.settings.model_name!r}"
            raise ApiError(404, problem, param="model", code="model_not_found")

    def _state(self) -> EngineState:
        llm = self.engine.llm
        return llm.between_steps(lambda engine: EngineState.of(engine, llm.health))


async def close(streams: Sequence[AsyncStream]) -> None:
    """End streams that nobody reads any more."""
    for stream in streams:
        await stream.aclose()


def described(service: Service, created: int) -> dict[str, Any]:
    """The model in the form of /v1/models."""
    return {
        "id": service.settings.model_name,
        "object": "model",
        "created": created,
        "owned_by": "outrider",
        "root": service.settings.model_name,
        "max_model_len": service.facts.longest,
        "speculation": list(service.allowed.names),
    }
