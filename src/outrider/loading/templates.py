"""Renders chat templates in processes of their own: they are programs of strangers, and a process can be limited and ended.

This file is also the program that runs there. As such it imports nothing of Outrider.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

#: Seconds that one rendering may take by the clock, for each second of CPU that it may have. Others may be at work, too.
_PATIENCE = 20


@dataclasses.dataclass(frozen=True)
class TemplateLimits:
    """Holds what the rendering of one conversation may cost."""

    seconds: float = 2.0  # of CPU
    mebibytes: int = 512  # of memory


class TemplateError(Exception):
    """A template refuses a conversation, or costs too much. The message says which."""


def renders_by_template(tokenizer: Any) -> bool:
    """Tells whether a tokenizer writes conversations by a template of Jinja, as transformers does, and not in its own
    way."""
    from transformers import PreTrainedTokenizerBase

    return getattr(type(tokenizer), "apply_chat_template", None) is PreTrainedTokenizerBase.apply_chat_template


def render_conversation(
    tokenizer: Any, conversation: Any, tools: Any, settings: Mapping[str, Any], limits: TemplateLimits
) -> str:
    """A conversation as a tokenizer's template writes it. Raises what `render` does, or ValueError without a template."""
    from outrider.loading.file_limits import VARIABLE, file_limits  # not where this file is a program

    template, most = tokenizer.get_chat_template(None, tools), file_limits()["template_bytes"]
    if len(template.encode("utf-8", "surrogatepass")) > most:
        raise TemplateError(f"it is larger than {most:,} bytes, to which {VARIABLE} limits template_bytes")
    return render(template, conversation, tools, {**tokenizer.special_tokens_map, **settings}, limits)


def render(template: str, messages: Sequence[Any], tools: Any, settings: Mapping[str, Any], limits: TemplateLimits) -> str:
    """A conversation as a chat template writes it, with the turn handed to the model.

    Args:
        tools: Descriptions of functions that may be called; None for none.
        settings: What else the template knows, special tokens among it.
    """
    asked = {
        "template": template,
        "messages": messages,
        "tools": tools,
        "settings": settings,
        "seconds": limits.seconds,
        "mebibytes": limits.mebibytes,
    }
    line = json.dumps(asked, default=_plain).encode() + b"\n"
    with _renderer() as renderer:
        answer = renderer.ask(line, limits)
    if "text" in answer:
        return str(answer["text"])
    raise TypeError(answer["problem"]) if answer.get("joins") else TemplateError(answer["problem"])


def _plain(value: Any) -> Any:
    """Returns what is no JSON as transformers shows it to templates: plain data, or the name of its type."""
    if isinstance(value, Mapping):
        return dict(value)
    if callable(getattr(value, "model_dump", None)):
        return value.model_dump()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return value.item()
    return f"<{type(value).__name__}>"


# --- The processes that render. There are as many as threads that render at a time.


class _Process:
    """A process that renders one conversation after the other, and ends with this one."""

    def __init__(self) -> None:
        quiet = {"TRANSFORMERS_VERBOSITY": "error", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **quiet},
            start_new_session=True,  # a Ctrl-C is not meant for it
        )

    def ask(self, line: bytes, limits: TemplateLimits) -> dict[str, Any]:
        """Returns what comes of a rendering. Where the process does not live on, `is_alive` is False."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        answer = b""
        try:
            process.stdin.write(line)
            process.stdin.flush()
            waiting = select.poll()
            waiting.register(process.stdout, select.POLLIN)
            if waiting.poll(1000 * (limits.seconds * _PATIENCE + 60)):
                answer = process.stdout.readline()
        except OSError:
            pass  # it has ended, which the lack of an answer tells, too
        if answer:
            found: dict[str, Any] = json.loads(answer)
            if "problem" in found and found.get("ends"):
                self.close()
            return found
        self.close()
        if self._process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            return {"problem": _too_slow(limits.seconds)}
        return {"problem": f"its process ended with {self._process.returncode}"}

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End it."""
        if self.is_alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.1)  # its own end says why
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()


_idle: list[_Process] = []
_turn = Lock()


@contextlib.contextmanager
def _renderer() -> Any:
    """A process that nobody else uses meanwhile."""
    with _turn:
        found = _idle.pop() if _idle else None
    if found is None or not found.is_alive:
        found = _Process()
    try:
        yield found
    except BaseException:
        found.close()  # an answer may still come, and would be taken for that of somebody else
        raise
    if found.is_alive:
        with _turn:
            _idle.append(found)


def start_renderer() -> None:
    """Start a process that renders, so that the first conversation need not wait for its imports."""
    with _turn:
        if not _idle:
            _idle.append(_Process())


def _close_all() -> None:
    while _idle:
        _idle.pop().close()


def _forget_all() -> None:
    """In a fork: the processes answer to the one that has started them."""
    global _turn
    _idle.clear()
    _turn = Lock()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_all)


# --- What such a process does.


def _too_slow(seconds: float) -> str:
    return f"it takes more than {seconds:g} seconds of CPU. The option --template-seconds of the server allows more"


def _serve() -> None:
    """Render what comes line by line, until nobody asks any more."""
    from transformers.utils.chat_template_utils import render_jinja_template

    asked, answers = sys.stdin.buffer, sys.stdout.buffer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in asked:
        answers.write(json.dumps(_rendered(json.loads(line), render_jinja_template)).encode() + b"\n")
        answers.flush()


def _rendered(asked: dict[str, Any], render_jinja_template: Any) -> dict[str, Any]:
    _limit(asked["seconds"], asked["mebibytes"])
    try:
        texts, _ = render_jinja_template(
            conversations=[
                [{name: value for name, value in each.items() if value is not None} for each in asked["messages"]]
            ],
            tools=asked["tools"],
            chat_template=asked["template"],
            add_generation_prompt=True,
            **asked["settings"],
        )
        return {"text": texts[0]}
    except MemoryError:
        allows = "The option --template-mib of the server allows more"
        return {"problem": f"it takes more than {asked['mebibytes']} MiB of memory. {allows}", "ends": True}
    except RecursionError:
        return {"problem": "it calls itself too often"}
    except TypeError as error:
        return {"problem": str(error), "joins": True}
    except Exception as error:
        return {"problem": str(error)}


def _limit(seconds: float, mebibytes: int) -> None:
    """Let this process have so much CPU and memory beyond what it has had."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = math.ceil(used.ru_utime + used.ru_stime + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        room = pages * resource.getpagesize() + mebibytes * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (room, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    _serve()
