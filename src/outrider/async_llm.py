"""The same engine for asyncio: many requests at a time, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self, cast
from weakref import WeakKeyDictionary

from outrider.arguments import Conversation, Prompt
from outrider.engine.mail import Mailbox, News
from outrider.engine.sequence import Request
from outrider.llm import LLM, Speculation
from outrider.params import RequestOutput, SamplingParams, StreamPiece


class AsyncLLM:
    """A model ready to write for coroutines. Whatever they ask for shares the engine's batches.

    Loading takes time and holds up the event loop: make it before the loop runs, or with asyncio.to_thread(AsyncLLM, ...).
    Prompts are encoded, and structures compiled, in other threads.

    Args:
        model, settings: As of LLM; or `model` is an LLM, which goes on to serve its own callers too.
    """

    def __init__(self, model: Any | None = None, **settings: Any) -> None:
        self.llm = model if isinstance(model, LLM) else LLM(model, **settings)
        self._offices: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopOffice] = WeakKeyDictionary()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End what runs with a ClosedError, and free the weights and the KV memory."""
        await asyncio.to_thread(self.llm.close)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        namespace: str | None = None,
        trace: bool = False,
        prediction: str | Sequence[int] | None = None,
    ) -> RequestOutput:
        """Complete one prompt; arguments and errors are those of LLM.generate. A task that is cancelled cancels it.

        A `prediction`, a text or token ids, is what the caller expects to be written. The method `prediction` drafts from
        it.
        """
        options = {"speculation": speculation, "namespace": namespace, "trace": trace, "prediction": prediction}
        return await self._whole(AsyncStream(self, prompt, params, {**options, "streaming": False}))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        namespace: str | None = None,
        trace: bool = False,
        prediction: str | Sequence[int] | None = None,
    ) -> AsyncStream:
        """Complete one prompt piece by piece; arguments and errors are those of LLM.stream. It begins when first read."""
        options = {"speculation": speculation, "namespace": namespace, "trace": trace, "prediction": prediction}
        return AsyncStream(self, prompt, params, {**options, "streaming": True})

    async def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        namespace: str | None = None,
        trace: bool = False,
        prediction: str | Sequence[int] | None = None,
    ) -> RequestOutput:
        """Complete one conversation; arguments and errors are those of LLM.chat."""
        options = {
            "speculation": speculation,
            "namespace": namespace,
            "trace": trace,
            "prediction": prediction,
            "messages": messages,
        }
        return await self._whole(AsyncStream(self, None, params, {**options, "streaming": False}))

    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        namespace: str | None = None,
        trace: bool = False,
        prediction: str | Sequence[int] | None = None,
    ) -> AsyncStream:
        """Complete one conversation piece by piece."""
        options = {
            "speculation": speculation,
            "namespace": namespace,
            "trace": trace,
            "prediction": prediction,
            "messages": messages,
        }
        return AsyncStream(self, None, params, {**options, "streaming": True})

    async def _whole(self, stream: AsyncStream) -> RequestOutput:
        async with stream:
            async for _ in stream:
                pass
            assert stream.output is not None
            return stream.output

    def _office(self) -> _LoopOffice:
        loop = asyncio.get_running_loop()
        if loop not in self._offices:
            self._offices[loop] = _LoopOffice(loop)
        return self._offices[loop]


class AsyncStream:
    """The pieces of one request as they come.

    Attributes:
        output: What the request came to, once it has ended.
    """

    def __init__(
        self, owner: AsyncLLM, prompt: Prompt | None, params: SamplingParams | None, options: dict[str, Any]
    ) -> None:
        self._owner = owner
        self._asked = prompt, params, options
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
            prompt, params, options = self._asked
            llm = self._owner.llm
            prepared = await asyncio.to_thread(llm.prepare, prompt, params, **options)
            self._inbox = _AsyncInbox(self._owner._office())
            refusals = await asyncio.wrap_future(llm.admit([prepared], self._inbox))
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
            news = await self._inbox.get()
            for piece in news.pieces:
                yield piece
            self.output = news.output
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

    def __init__(self, office: _LoopOffice) -> None:
        self._office = office
        self._news: asyncio.Queue[News] = asyncio.Queue()

    @property
    def office(self) -> _LoopOffice:
        return self._office

    def put(self, news: News) -> None:
        self._news.put_nowait(news)

    async def get(self) -> News:
        return await self._news.get()


class _LoopOffice:
    """Wakes an event loop once for all news of a step."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def deliver(self, letters: Sequence[tuple[Mailbox, News]]) -> None:
        self._loop.call_soon_threadsafe(_put_all, letters)


def _put_all(letters: Sequence[tuple[Mailbox, News]]) -> None:
    for mailbox, news in letters:
        assert isinstance(mailbox, _AsyncInbox)
        mailbox.put(news)
