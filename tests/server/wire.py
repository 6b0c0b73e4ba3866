"""A small client for HTTP/1.1, for hundreds of clients in one process, and for those who leave or read slowly."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Self


class Connection:
    """A connection that stays open from one request to the next.

    Args:
        url: Of the server, without a path.
        receive_bytes: The memory of the system for what was not read yet; None for its own choice.
    """

    def __init__(self, url: str, receive_bytes: int | None = None) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._address, self._receive_bytes = (host, int(port)), receive_bytes
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def __aenter__(self) -> Self:
        plain = socket.socket(proto=socket.IPPROTO_TCP)
        if self._receive_bytes is not None:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_bytes)
        plain.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(plain, self._address)
        except BaseException:
            plain.close()
            raise
        self._reader, self._writer = await asyncio.open_connection(sock=plain, limit=2**16)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    def leave(self) -> None:
        """Break the connection off at once."""
        self._writer.transport.abort()

    def send(self, rest: bytes) -> None:
        """More of a body that was said to be longer than what came with its request."""
        self._writer.write(rest)

    async def ask(self, path: str, body: bytes | None = None, *, size: int | None = None, **headers: str) -> Answer:
        """Send a request; returns when the head of the answer is there. `size` is what it says of its body's."""
        lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"host: {self._address[0]}"]
        lines += [] if body is None or "content_type" in headers else ["content-type: application/json"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        lines += [] if body is None else [f"content-length: {len(body) if size is None else size}"]
        self._writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b""))
        await self._writer.drain()
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in head[1:] if line)
        return Answer(self._reader, int(head[0].split(" ")[1]), {name.lower(): value.strip() for name, _, value in pairs})


class Answer:
    """What a server answers.

    Args:
        reader: Where the body comes from.
        status: Of HTTP.
        headers: With names in small letters.
    """

    def __init__(self, reader: asyncio.StreamReader, status: int, headers: dict[str, str]) -> None:
        self._reader, self.status, self.headers = reader, status, headers

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes."""
        if "chunked" not in self.headers.get("transfer-encoding", ""):
            yield await self._reader.readexactly(int(self.headers.get("content-length", "0")))
            return
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readexactly(2)

    async def body(self) -> bytes:
        """All of it."""
        return b"".join([part async for part in self.parts()])

    async def events(self) -> AsyncGenerator[bytes, None]:
        """What stands behind each `data: ` of a stream."""
        rest = b""
        async for part in self.parts():
            *whole, rest = (rest + part).split(b"\n\n")
            for event in whole:
                yield event.removeprefix(b"data: ")
        if rest.strip():  # some servers leave out the last empty line
            yield rest.strip().removeprefix(b"data: ")
