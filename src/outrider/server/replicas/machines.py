"""The machines of a cluster: room for the replicas, and ports on the loopback. Nothing here imports Ray."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from outrider.errors import InvalidParameterError, ModelTooLargeError, UnsupportedParameterError
from outrider.loading.fit import Needs, available_bytes
from outrider.loading.sources import usable_device
from outrider.server.errors import log

# --- Checks whether the machine has room for the replicas, and divides it among them.


#: The part of the free memory that keys and values get where their size is not given, as for a single engine.
_KV_SHARE = 0.25
_REACHING_SECONDS = 5.0


@dataclass(frozen=True)
class Machine:
    """A machine that replicas may run on."""

    memory_bytes: int  # what is free there
    num_cpus: int  # its cores


@dataclass(frozen=True)
class Share:
    """Holds what a replica gets."""

    kv_tokens: int | None  # tokens of keys and values; None where it is not known what a token takes
    num_threads: int  # threads of its engine
    per_machine: int  # replicas of a machine


def threads_of(shared: Share) -> str:
    """Threads of each replica: what the variable OMP_NUM_THREADS says, or its share of the cores."""
    return os.environ.get("OMP_NUM_THREADS", str(shared.num_threads))


def own_machine(device: str | None) -> Machine:
    """This machine."""
    found = usable_device(device)
    if found.type != "cpu":
        problem = "replicas run on CPUs so far"
        raise UnsupportedParameterError("device", str(found), problem, 'Use "cpu", or leave --replicas out.')
    free = available_bytes(found)
    return Machine(sys.maxsize if free is None else free, len(os.sched_getaffinity(0)))


def check_cluster(address: str) -> None:
    """Raise where no cluster can be reached, since Ray itself would go on to try for many minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _REACHING_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        remedy = "Use host:port of a machine on which ray start --head runs, or leave the variable out."
        raise InvalidParameterError("RAY_ADDRESS", address, f"no cluster is there ({error})", remedy) from None


def share(
    model: str, found: Sequence[Needs], count: int, machines: Sequence[Machine], kv_tokens: int | None, most_tokens: int
) -> Share:
    """Returns what each replica gets. Machines get equally many, so the smallest one decides.

    Args:
        kv_tokens: Tokens of keys and values that each replica is to have; None for a share of the free memory.
    """
    per_machine = -(-count // len(machines))
    available = min(machine.memory_bytes for machine in machines)
    weights, per_token = sum(each.weight_bytes for each in found), sum(each.kv_token_bytes for each in found)
    kv = max(1, kv_tokens or 0) * per_token
    if per_machine * (weights + kv) > available:
        fitting = available // (weights + kv) * len(machines)
        keys = f" and {kv / 1e9:.2f} GB for keys and values" if kv_tokens else ""
        problem = (
            f"{count} replicas are {per_machine} on a machine, each needs {weights / 1e9:.2f} GB for weights{keys}, "
            f"and {available / 1e9:.2f} GB of memory are available there"
        )
        remedy = f"Use --replicas {fitting} or less." if fitting else "Use a smaller model, or a machine with more memory."
        raise ModelTooLargeError(model, problem, remedy, weights, kv, available)
    if kv_tokens is None and per_token:
        room = _KV_SHARE * (available / per_machine - weights)
        kv_tokens = max(1, min(most_tokens, int(room / per_token)))
    return Share(kv_tokens, max(1, min(machine.num_cpus for machine in machines) // per_machine), per_machine)


# --- Keeps the ports of a local Ray cluster on the loopback.
#
# Ray's processes listen at all addresses of a machine, so that other machines may join, and they run what they are
# sent. Where all replicas are on this machine, nobody else has to reach them. Clients reach the address of `--host` all
# the same.


#: Named for the systems where clusters of several machines are off by default. "0" turns them off here, too.
_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_LOOPBACK = "127.0.0.1"


def keep_cluster_local() -> None:
    """Let the cluster that this process starts be one of this machine alone; before Ray is imported."""
    os.environ[_VARIABLE] = "0"


def keep_replica_local() -> None:
    """Let the replica whose process this is listen at the loopback, if its cluster is local; in its constructor.

    Ray Serve gives no setting for the port at which a replica takes calls of other replicas.
    """
    if os.environ.get(_VARIABLE) != "0":
        return
    module = import_module("ray.serve._private.replica")
    stock = getattr(module, "add_port_to_grpc_server", None)
    if stock is None:
        log("this version of Ray lets replicas listen at all addresses", {}, logging.WARNING)
        return

    def add_port(server: Any, address: str) -> Any:
        return stock(server, f"{_LOOPBACK}:{address.rpartition(':')[2]}")

    module.add_port_to_grpc_server = add_port  # type: ignore[attr-defined]
