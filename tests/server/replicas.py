"""The processes of a local cluster."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from tests.server.running import Server


def engine_pids(server: Server) -> list[int]:
    """The processes of the engines of a server that runs with --replicas."""
    parents = _parents()
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


def listening_at(server: Server) -> dict[str, set[str]]:
    """The addresses at which the processes of a server listen, each with their names."""
    own = _sockets(server)
    found: dict[str, set[str]] = {}
    for kind in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{kind}").read_text("ascii").splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in own:
                found.setdefault(_address(local.partition(":")[0]), set()).add(own[rest[5]])
    return found


def _address(written: str) -> str:
    """An address as the kernel writes it: words of four bytes, each in the order of the machine."""
    words = [bytes.fromhex(written[at : at + 8])[::-1] for at in range(0, len(written), 8)]
    found = ip_address(b"".join(words))
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return str(mapped or found)


def _sockets(server: Server) -> dict[str, str]:
    """The sockets of a server and all processes below it, with the names of these."""
    parents, found = _parents(), {}
    for pid in [pid for pid in parents if _descends(pid, server.process.pid, parents)]:
        with suppress(OSError):
            name = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    found[os.readlink(entry).removeprefix("socket:[").removesuffix("]")] = name[:100].strip()
    return found


def _parents() -> dict[int, int]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError):  # it has ended meanwhile
                found[int(entry.name)] = int((entry / "stat").read_text("ascii").rpartition(")")[2].split()[1])
    return found


def _is_engine(pid: int) -> bool:
    try:
        return b"ServeReplica:outrider:engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != ancestor:
        pid = parents[pid]
    return pid == ancestor
