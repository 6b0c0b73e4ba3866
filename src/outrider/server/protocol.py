"""What clients are told whose request is no HTTP that can be read: an error object, as all others get."""

from __future__ import annotations

import logging
import secrets
import sys

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from outrider.server.errors import ApiError
from outrider.server.logs import log
from outrider.server.streams import encoded


class Protocol(H11Protocol):
    """uvicorn's protocol, whose own refusals are plain text otherwise."""

    def send_400_response(self, msg: str) -> None:
        """Answer a request that cannot be read, and close the connection.

        Args:
            msg: What uvicorn would say.
        """
        found, name = _refusal(sys.exception(), msg), secrets.token_hex(12)
        log("a request cannot be read", {"request_id": name, "status": found.status}, logging.WARNING)
        body = encoded(found.body)
        headers = {"content-type": "application/json", "content-length": str(len(body)), "x-request-id": name}
        lines = [(key.encode(), value.encode()) for key, value in {**headers, "connection": "close"}.items()]
        for event in (h11.Response(status_code=found.status, headers=lines), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _refusal(error: BaseException | None, usual: str) -> ApiError:
    """What is told of an error of h11, which is being handled where uvicorn refuses a request."""
    if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
        return ApiError(431, "the headers of the request are too large", code="headers_too_large")
    return ApiError(400, f"the request is no HTTP that can be read ({error or usual})", code="invalid_http")
