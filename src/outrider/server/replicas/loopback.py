"""Keeps the ports of a local Ray cluster on the loopback.

Ray's processes listen at all addresses of a machine, so that other machines may join, and they run what they are sent.
Where all replicas are on this machine, nobody else has to reach them. Clients reach the address of `--host` all the same.
"""

from __future__ import annotations

import logging
import os
from importlib import import_module
from typing import Any

from outrider.server.logs import log

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
