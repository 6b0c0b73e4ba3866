"""AsyncLLM: the engine for asyncio, many requests at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, Self, TypeVar, Unpack, cast
from weakref import WeakKeyDictionary

from outrider.arguments import Conversation, Prompt
from outrider.engine.hosting.dispatcher import Mailbox, RequestUpdate
from outrider.engine.hosting.preparing import PreparingThreads
from outrider.engine.sequence import Request
from outrider.llm import LLM
from outrider.options import CallOptions
from outrider.params import RequestOutput, SamplingParams, StreamPiece
from outrider.structured.trials import Trials
from outrider.validation import unknown_setting

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

    def __init__(self, model: Any | None = None, **settings: Any) -> None:
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

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> RequestOutput:
        """Complete one prompt; errors are those of LLM.generate. A task that is cancelled cancels it.

        Args:
            prompt: As in LLM.generate.
            params: As in LLM.generate.
            options: `speculation`, `namespace`, `trace`, `prediction`, `priority` and `decoder_prompt`; see CallOptions.
        """
        return await self._whole(AsyncStream(self, prompt, params, options))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[CallOptions]) -> AsyncStream:
        """Complete one prompt piece by piece; arguments are those of `generate`. It begins when first read."""
        return AsyncStream(self, prompt, params, options, streaming=True)

    async def chat(
        self, messages: Conversation, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> RequestOutput:
        """Complete one conversation; errors are those of LLM.chat, and options those of `generate`."""
        return await self._whole(AsyncStream(self, None, params, options, messages=messages))

    def stream_chat(
        self, messages: Conversation, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> AsyncStream:
        """Complete one conversation piece by piece; options are those of `generate`."""
        return AsyncStream(self, None, params, options, messages=messages, streaming=True)

    async def prepared(self, namespace: str | None, call: Callable[[], T]) -> T:
        """What a function answers, which is called in another thread when it is the turn of a namespace.

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

    Raises:
        InvalidParameterError: There is no such option.
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
        for name, value in options.items():
            if name not in CallOptions.__annotations__:
                raise unknown_setting("AsyncLLM", name, value, CallOptions.__annotations__)
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
        """Prepare and admit the request now, rather than at the first piece.

        Raises:
            OutriderError: It cannot be served.
        """
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
