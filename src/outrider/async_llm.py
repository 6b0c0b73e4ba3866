"""AsyncLLM: the engine for asyncio, many requests at a time."""

from __future__ import annotations

import asyncio
import os
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from time import perf_counter
from typing import Any, Self, TypeVar, Unpack, cast
from weakref import WeakKeyDictionary

from outrider.conversations import Conversation
from outrider.engine.sequence import Request
from outrider.engine.tenants import Tenant, Turns
from outrider.engine.thread import Mailbox, RequestUpdate
from outrider.errors import ClosedError
from outrider.llm import LLM
from outrider.options import CallOptions, LLMSettings, names_keywords, refuse_keywords
from outrider.params import RequestOutput, SamplingParams, StreamPiece
from outrider.prompts import Prompt
from outrider.structured.trials import Trials

T = TypeVar("T")


class AsyncLLM:
    """A model ready to write for coroutines. Whatever they ask for shares the engine's batches.

    Loading takes time and holds up the event loop: make it before the loop runs, or with asyncio.to_thread(AsyncLLM, ...).
    Several may be made at once; they are loaded one after another.
    Prompts are encoded, and structures compiled, in a few other threads, for which namespaces take turns. Structures may
    come from strangers: they are tried in another process first, which the system ends when one takes too much.

    Args:
        model: As of LLM; or an LLM, which goes on to serve its own callers too.
        **settings: As of LLM.

    Attributes:
        llm: The model.
        preparing: The threads in which requests are prepared.
        trials: The processes in which structures are tried.
    """

    @names_keywords(LLMSettings)
    def __init__(self, model: Any | None = None, **settings: Unpack[LLMSettings]) -> None:
        self.llm = model if isinstance(model, LLM) else LLM(model, **settings)
        self.preparing = PreparingThreads()
        self.trials = self.llm.engine.grammars.trials = Trials()
        self._offices: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopDispatcher] = WeakKeyDictionary()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End what runs with a ClosedError, and free the weights and the KV memory."""
        self.preparing.close()
        await asyncio.to_thread(self.trials.close)
        await asyncio.to_thread(self.llm.close)

    @names_keywords(CallOptions)
    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> RequestOutput:
        """Complete one prompt; errors are those of LLM.generate. A task that is cancelled cancels it.

        Args:
            prompt: As in LLM.generate.
            params: As in LLM.generate.
            options: `speculation`, and those of LLM.generate; see CallOptions.
        """
        return await self._whole(AsyncStream(self, prompt, params, options))

    @names_keywords(CallOptions)
    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[CallOptions]) -> AsyncStream:
        """Complete one prompt piece by piece; arguments are those of `generate`. It begins when first read."""
        return AsyncStream(self, prompt, params, options, streaming=True)

    @names_keywords(CallOptions)
    async def chat(
        self, messages: Conversation, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> RequestOutput:
        """Complete one conversation; errors are those of LLM.chat, and options those of `generate`."""
        return await self._whole(AsyncStream(self, None, params, options, messages=messages))

    @names_keywords(CallOptions)
    def stream_chat(
        self, messages: Conversation, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> AsyncStream:
        """Complete one conversation piece by piece; options are those of `generate`."""
        return AsyncStream(self, None, params, options, messages=messages, streaming=True)

    async def prepared(self, namespace: str | None, call: Callable[[], T]) -> T:
        """Returns what a function answers, which is called in another thread when it is the turn of a namespace.

        Raises:
            ClosedError: The LLM was closed before that.
            Exception: What the function raises.
        """
        return await asyncio.wrap_future(self.preparing.submit(namespace, call))

    async def _whole(self, stream: AsyncStream) -> RequestOutput:
        async with stream:
            async for _ in stream:
                pass
            assert stream.output is not None
            return stream.output

    def _dispatcher(self) -> _LoopDispatcher:
        loop = asyncio.get_running_loop()
        if loop not in self._offices:
            self._offices[loop] = _LoopDispatcher(loop)
        return self._offices[loop]


class AsyncStream:
    """The pieces of one request as they come.

    Attributes:
        output: What the request came to, once it has ended.
    """

    def __init__(
        self,
        owner: AsyncLLM,
        prompt: Prompt | None,
        params: SamplingParams | None,
        options: CallOptions,
        *,
        messages: Conversation | None = None,
        streaming: bool = False,
    ) -> None:
        refuse_keywords(owner.generate, options)
        self._owner = owner
        self._namespace = options.get("namespace")
        self._prepare = partial(owner.llm.prepare, prompt, params, messages=messages, streaming=streaming, **options)
        self._request: Request | None = None
        self._inbox: _AsyncInbox | None = None
        self.output: RequestOutput | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def begin(self) -> Request:
        """Prepare and admit the request now, rather than at the first piece."""
        if self._request is None:
            prepared = await self._owner.prepared(self._namespace, self._prepare)
            self._inbox = _AsyncInbox(self._owner._dispatcher())
            refusals = await asyncio.wrap_future(self._owner.llm.admit([prepared], self._inbox))
            if refusals[0] is not None:
                raise cast(Exception, refusals.pop())  # taken out: it points at this frame
            self._request = prepared
        return self._request

    def __aiter__(self) -> AsyncIterator[StreamPiece]:
        return self._pieces()

    async def _pieces(self) -> AsyncIterator[StreamPiece]:
        await self.begin()
        assert self._inbox is not None
        while self.output is None:
            update = await self._inbox.get()
            for piece in update.pieces:
                yield piece
            self.output = update.output
        if self.output.error is not None:
            raise self.output.error

    def cancel(self) -> None:
        """Stop it; what it has written stays, and its output has the finish_reason "cancelled"."""
        if self._request is not None:
            self._owner.llm.cancel(self._request)

    async def aclose(self) -> None:
        """Stop it, where it has not ended, and forget it."""
        if self._request is not None:
            self._owner.llm.drop(self._request)


class _AsyncInbox:
    """A mailbox of one request in an event loop."""

    def __init__(self, dispatcher: _LoopDispatcher) -> None:
        self._dispatcher = dispatcher
        self._updates: asyncio.Queue[RequestUpdate] = asyncio.Queue()

    @property
    def dispatcher(self) -> _LoopDispatcher:
        return self._dispatcher

    def put(self, update: RequestUpdate) -> None:
        self._updates.put_nowait(update)

    async def get(self) -> RequestUpdate:
        return await self._updates.get()


class _LoopDispatcher:
    """Wakes an event loop once for all updates of a step."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def deliver(self, updates: Sequence[tuple[Mailbox, RequestUpdate]]) -> None:
        self._loop.call_soon_threadsafe(_put_all, updates)


def _put_all(updates: Sequence[tuple[Mailbox, RequestUpdate]]) -> None:
    for mailbox, update in updates:
        assert isinstance(mailbox, _AsyncInbox)
        mailbox.put(update)


# --- Prepares requests in a thread pool that is fair between tenants. No torch.


_Call = tuple[Callable[[], Any], "Future[Any]"]


def _usual_threads() -> int:
    """Few: whoever computes in Python holds up the engine's own thread."""
    return max(2, min(4, (os.cpu_count() or 1) // 2))


class PreparingThreads:
    """A few threads for what is done before the engine sees a request: reading, encoding, compiling.

    Tenants take turns. Whoever has had least of the threads' time, divided by its weight, is next, and of several that have
    had the same, whoever was next least lately. No tenant has all threads at a time, so that the others need not wait until
    one of its calls ends.

    Args:
        num_threads: At least 2; None takes a few, by the number of cores.
        clock: Tells the time in seconds.

    Attributes:
        turns: What each tenant has had, in seconds, and what its share is.
    """

    def __init__(self, num_threads: int | None = None, clock: Callable[[], float] = perf_counter) -> None:
        self._num_threads = _usual_threads() if num_threads is None else num_threads
        self._threads = ThreadPoolExecutor(self._num_threads, "outrider-prepare")
        self._clock = clock
        self._lock = Lock()
        self._waiting: dict[Tenant, deque[_Call]] = {}  # whoever was next least lately stands first
        self._running: Counter[Tenant] = Counter()
        self._closed = False
        self.turns = Turns()

    def submit(self, tenant: Tenant, call: Callable[[], T]) -> Future[T]:
        """Have a function called when it is the tenant's turn. Whoever cancels the outcome before that takes it back."""
        outcome: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise ClosedError
            self.turns.welcome(tenant, self._waiting.keys() | self._running.keys())
            self._waiting.setdefault(tenant, deque()).append((call, outcome))
            self._threads.submit(self._work)
        return outcome

    def close(self) -> None:
        """Refuse what waits with a ClosedError; what runs goes on to its end, and nobody waits for it."""
        with self._lock:
            self._closed = True
            left = [outcome for calls in self._waiting.values() for _, outcome in calls]
            self._waiting.clear()
        for outcome in left:
            if outcome.set_running_or_notify_cancel():
                outcome.set_exception(ClosedError())
        self._threads.shutdown(wait=False)

    def _work(self) -> None:
        """Carry out calls as long as there is one whose tenant may have one thread more."""
        while (found := self._take()) is not None:
            tenant, (call, outcome) = found
            del found
            begun = self._clock()
            _carry_out(call, outcome)
            del call, outcome  # they may be all that keeps a model alive
            self._end(tenant, self._clock() - begun)

    def _take(self) -> tuple[Tenant, _Call] | None:
        """The next call, and whose it is; None where nobody waits who may have a thread more."""
        with self._lock:
            free = [tenant for tenant in self._waiting if self._running[tenant] < self._num_threads - 1]
            if not free:
                return None
            tenant = min(free, key=self.turns.had)
            calls = self._waiting.pop(tenant)
            found = calls.popleft()
            if calls:
                self._waiting[tenant] = calls  # behind all others
            self._running[tenant] += 1
            return tenant, found

    def _end(self, tenant: Tenant, seconds: float) -> None:
        with self._lock:
            self.turns.charge(tenant, seconds)
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]


def _carry_out(call: Callable[[], Any], outcome: Future[Any]) -> None:
    if not outcome.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        outcome.set_exception(error)
    else:
        outcome.set_result(result)
