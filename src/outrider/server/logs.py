"""The server's log: lines to read on a terminal, a JSON object a line elsewhere, and no text of a prompt or an answer."""

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


class PlainFormatter(logging.Formatter):
    """A record as a line for somebody who watches: the event, and its facts as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "facts", {})
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        line = f"{clock} {level}{record.getMessage()}" + "".join(f" {name}={_shown(fact)}" for name, fact in facts.items())
        if record.getMessage() == "listening":
            line += f"\n\n  Open {facts['url']}/ to try it, and {facts['url']}/learn to see why it works.\n"
            line += f"  Programs that speak to OpenAI's API use {facts['url']}/v1. Ctrl-C ends the server.\n"
        if record.exc_info and record.exc_info[0] is not None:
            line += "\n" + "".join(traceback.format_exception(*record.exc_info))
        return line


def _shown(fact: Any) -> str:
    return fact if isinstance(fact, str) and " " not in fact else json.dumps(fact, ensure_ascii=False, default=str)


def write_logs(level: int = logging.INFO) -> None:
    """Send all logs of the process to standard error: for people where that is a terminal, else as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter() if sys.stderr.isatty() else JsonFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("outrider").setLevel(level)


def log(event: str, facts: Mapping[str, Any], level: int = logging.INFO, *, error: BaseException | None = None) -> None:
    """Write an event with its facts."""
    logger.log(level, event, extra={"facts": dict(facts)}, exc_info=error)
