"""The processes of a local cluster."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.server.running import Server


def engine_pids(server: Server) -> list[int]:
    """The processes of the engines of a server that runs with --replicas."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text("ascii").rpartition(")")[2].split()[1])
            except (OSError, ValueError):  # it has ended meanwhile
                continue
    return sorted(pid for pid in parents if _is_engine(pid) and _descends(pid, server.process.pid, parents))


def kill_one(server: Server) -> None:
    """End one engine as the system does when there is no memory left."""
    os.kill(engine_pids(server)[0], signal.SIGKILL)


def kill_all(server: Server) -> None:
    """The same for all of them."""
    for pid in engine_pids(server):
        os.kill(pid, signal.SIGKILL)


def replicas(server: Server) -> set[str]:
    """The names of the replicas that answer."""
    lines = server.get("/metrics").text.splitlines()
    return {
        line.partition('replica="')[2].partition('"')[0] for line in lines if line.startswith("vllm:num_requests_running{")
    }


def _is_engine(pid: int) -> bool:
    try:
        return b"ServeReplica:outrider:engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != ancestor:
        pid = parents[pid]
    return pid == ancestor
