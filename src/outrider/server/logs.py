"""The server's log: a JSON object a line, without any text of a prompt or an answer."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("outrider.server")


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON; what was given as `extra={"facts": {...}}` stands beside the message."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line, ensure_ascii=False, default=str)


def write_json(level: int = logging.INFO) -> None:
    """Send all logs of the process to standard error, as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("outrider").setLevel(level)


def log(event: str, facts: Mapping[str, Any], level: int = logging.INFO, *, error: BaseException | None = None) -> None:
    """Write an event with its facts."""
    logger.log(level, event, extra={"facts": dict(facts)}, exc_info=error)
