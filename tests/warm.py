"""Processes of Python that begin with PyTorch imported: forks of one that has imported what the package stands on.

To import PyTorch and transformers takes longer than most of what tests ask of a process. `python warm.py` takes orders from
a socket. For each it forks twice: the second fork runs a module as `python -m` does, and the first one waits for its end.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
#: How the command imports what it needs, and no more of it.
STARTUP = ROOT / "src" / "outrider" / "cli" / "startup.py"
#: What servers, commands and checks of mutants import before the package's own modules.
_BELOW = (
    *("torch", "pydantic", "safetensors.torch", "tokenizers", "llguidance", "typer", "rich.console"),
    *("transformers.modeling_utils", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama"),
    *("transformers.models.mistral.modeling_mistral", "transformers.integrations.sdpa_attention"),
    *("starlette.applications", "uvicorn", "prometheus_client", "hypothesis", "pytest"),
)


class Forked:
    """A process, with the part of Popen's interface that tests use.

    Args:
        command: Its module and arguments.
        ends: Where its number comes, and how it has ended.

    Attributes:
        stderr: What it writes there, line by line; None where that goes to a file.
    """

    stderr: IO[str] | None = None

    def __init__(self, command: Sequence[str], ends: IO[bytes]) -> None:
        self.args = list(command)
        self.returncode: int | None = None
        self._ends = ends
        self.pid = int(ends.readline())

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status. Raises TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._ends], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(self._ends.readline())
            self._ends.close()
        return self.returncode

    def poll(self) -> int | None:
        """The same; None as long as it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since, and the word of its end is under way
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class WarmPython:
    """The other end, in the process of the tests."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    def start(self, module: str, *arguments: str, folder: Path = ROOT, **environment: str) -> Forked:
        """Run a module as `python -m` does, in a folder. What it writes to standard output is thrown away."""
        read, written = os.pipe()
        with open(os.devnull, "r+b") as nothing, os.fdopen(written, "wb") as errors:
            found = self._order((module, *arguments), folder, environment, (nothing, nothing, errors))
        found.stderr = os.fdopen(read, "r", 1, "utf-8")
        return found

    def run(
        self,
        module: str,
        *arguments: str,
        stdin: str = "",
        folder: Path = ROOT,
        timeout: float = 120,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        """The same to its end, with what it writes. Raises TimeoutExpired, and then it no longer runs."""
        with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as errors:
            asked.write(stdin.encode())
            asked.seek(0)
            found = self._order((module, *arguments), folder, environment, (asked, said, errors))
            try:
                status = found.wait(timeout)
            except subprocess.TimeoutExpired:
                found.kill()
                raise
            texts = (os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode() for file in (said, errors))
            return subprocess.CompletedProcess(found.args, status, *texts)

    def _order(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], streams: Sequence[IO[bytes]]
    ) -> Forked:
        """Have a fork run a command, with its input, output and errors."""
        module, *arguments = command
        order = {
            "module": module,
            "arguments": arguments,
            "folder": str(folder),
            "environment": {**os.environ, **environment},
        }
        ended, ends = os.pipe()
        content = json.dumps(order).encode()
        files = [ends, *(stream.fileno() for stream in streams)]
        socket.send_fds(self._socket, [len(content).to_bytes(8)], files)
        self._socket.sendall(content)
        os.close(ends)
        return Forked(command, os.fdopen(ended, "rb", 0))

    def close(self) -> None:
        """Processes that still run go on."""
        self._socket.close()
        self._process.wait()


@cache
def warm_python() -> WarmPython:
    """The one of this process. It ends with it."""
    found = WarmPython()
    atexit.register(found.close)
    return found


def _orders(number: int) -> dict[str, Any] | None:
    """In a fork its order; None when there will be no more."""
    with socket.socket(fileno=number) as orders:
        while size := _received(orders):
            length, (ends, *streams) = size
            content = b""
            while len(content) < length:
                content += orders.recv(length - len(content))
            if not os.fork():
                break
            for file in (ends, *streams):
                os.close(file)
            _reap()
        else:
            return None
    child = os.fork()
    if child:
        os.write(ends, b"%d\n" % child)
        for file in streams:
            os.close(file)
        os.write(ends, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os._exit(0)
    os.close(ends)
    for place, file in enumerate(streams):  # these are farther than 2, where the process has its own streams
        os.dup2(file, place)
        os.close(file)
    order: dict[str, Any] = json.loads(content)
    return order


def _received(orders: socket.socket) -> tuple[int, list[int]] | None:
    """The length of the next order, where its end is told, and its three streams."""
    content, files, _, _ = socket.recv_fds(orders, 8, 4)
    return (int.from_bytes(content), files) if content else None


def _reap() -> None:
    """Forget forks whose processes have ended."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


def _run(
    installed: Sequence[str], module: str, arguments: Sequence[str], folder: str, environment: Mapping[str, str]
) -> None:
    """What `python -m` would do in that folder, with these variables. The package lies in the last places, where it is
    installed to be edited; the folder and the variables may name another one."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path += installed
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    own = {ROOT, ROOT / "src", Path(__file__).parent}  # and not all below ROOT: the environment may lie there
    installed = [place for place in sys.path if Path(place or ".").resolve() == ROOT / "src"]
    sys.path = [place for place in sys.path if Path(place or ".").resolve() not in own]
    with runpy.run_path(str(STARTUP))["light_imports"]():
        for name in _BELOW:
            importlib.import_module(name)
    assert "outrider" not in sys.modules
    order = _orders(int(sys.argv[1]))
    if order is not None:
        _run(installed, **order)
