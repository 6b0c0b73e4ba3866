"""Starts and ends the cluster: an ingress and the replicas."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

import ray
from ray import serve
from ray.serve.config import HTTPOptions, ProxyLocation, RequestRouterConfig

from outrider.errors import OtherEngineError
from outrider.server.logs import log
from outrider.server.replicas.capacity import Machine, Share, threads_of
from outrider.server.replicas.engine import EngineReplica
from outrider.server.replicas.ingress import Ingress
from outrider.server.replicas.router import PrefixRouter
from outrider.server.replicas.watch import watched
from outrider.server.service import Service
from outrider.server.settings import ServerSettings
from outrider.server.tenancy.keys import ApiKeys

#: More requests than a deployment ever has: the engines themselves refuse what is too much for them.
_NO_LIMIT = 1_000_000
#: Where Ray keeps what processes hand to each other: requests and parts of answers.
_OBJECT_STORE_BYTES = 128 * 2**20
_NAME, _ENGINE, _INGRESS = "outrider", "engine", "ingress"
#: How often Ray Serve asks a process whether it is well. One that has not said so in time for three times is replaced.
_HEALTH = {"health_check_period_s": 2.0, "health_check_timeout_s": 10.0}
#: What may be added to the time to drain: the engines clear away what was cut off, and free their memory.
_ENDING_SECONDS = 30.0


@contextmanager
def cluster() -> Iterator[None]:
    """A cluster of Ray on this machine, or the one that the variable RAY_ADDRESS names; that one goes on afterwards.

    Raises:
        OtherEngineError: It cannot be joined.
    """
    address = os.environ.get("RAY_ADDRESS")
    own = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    try:
        ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **({} if address else own))
    except Exception as error:  # of a dozen kinds, plain Exception among them
        raise _not_started(address, error) from error
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    signal.signal(signal.SIGTERM, _end)  # in place of Ray's own, which would end at once
    try:
        yield
    finally:
        if address:  # a cluster of our own goes as a whole
            serve.shutdown()
        ray.shutdown()


def cluster_machines() -> list[Machine]:
    """The machines of the cluster."""
    found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Machine(int(each.get("memory", 0)), int(each.get("CPU", 0))) for each in found]


def serve_replicas(
    make: Callable[[], Service],
    count: int,
    shared: Share,
    settings: ServerSettings,
    keys: ApiKeys,
    *,
    slack: int,
    drain_seconds: int,
    **http: Any,
) -> None:
    """Serve until SIGTERM or Ctrl-C inside a cluster, then refuse what is new and let those who are being served finish.

    Args:
        make: Loads the model, in the process of a replica.
        count: Replicas.
        shared: What each of them gets.
        settings: Names and limits.
        keys: Who may ask.
        slack: See PrefixIndex.
        drain_seconds: How long requests may take to finish at the end; then they are ended.
        http: Options of Ray Serve's HTTPOptions.

    Raises:
        OtherEngineError: The replicas do not start.
    """
    options = HTTPOptions(**http)
    with ExitStack() as stack:
        try:
            serve.start(ProxyLocation.HeadOnly, options)
            look = stack.enter_context(watched(count, _num_running))
            serve.run(_application(make, count, shared, settings, keys, slack), name=_NAME, route_prefix="/")
        except Exception as error:
            problem = f"the replicas do not start ({_reason(error)})"
            raise OtherEngineError("Ray Serve", problem, "Correct what it names.") from error
        stack.callback(_drain, drain_seconds)
        look()  # so that the log tells of the replicas before it says that they listen
        scheme = "https" if options.ssl_certfile else "http"
        host = f"[{options.host}]" if ":" in str(options.host) else options.host
        log("listening", {"url": f"{scheme}://{host}:{options.port}", "model": settings.model_name, "replicas": count})
        threading.Event().wait()


def _application(
    make: Callable[[], Service], count: int, shared: Share, settings: ServerSettings, keys: ApiKeys, slack: int
) -> serve.Application:
    environment = {**_own_environment(), "OMP_NUM_THREADS": threads_of(shared)}
    engine = serve.deployment(
        EngineReplica,
        name=_ENGINE,
        num_replicas=count,
        max_replicas_per_node=shared.per_machine,
        max_ongoing_requests=_NO_LIMIT,
        max_constructor_retry_count=1,  # of the first replicas: what cannot be loaded once cannot be loaded later
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": environment}},
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter, request_router_kwargs={"slack": slack}
        ),
        **_HEALTH,
    ).bind(make)
    ingress = serve.deployment(
        Ingress, name=_INGRESS, max_ongoing_requests=_NO_LIMIT, ray_actor_options={"num_cpus": 0}, **_HEALTH
    )
    return ingress.bind(engine, keys, settings)


def _not_started(address: str | None, error: Exception) -> OtherEngineError:
    if address:
        remedy = "See that the cluster runs, has the versions of Python and Ray of this machine, and accepts its token."
        return OtherEngineError("Ray", f"the cluster cannot be joined ({_last_line(str(error))})", remedy)
    remedy = "Correct what it names. It needs a writable folder with a short path (TMPDIR), and memory in /dev/shm."
    return OtherEngineError("Ray", f"no cluster can be started here ({_last_line(str(error))})", remedy)


def _reason(error: Exception) -> str:
    """What stands in the last line of a traceback: of the replica that did not start, or of the error itself."""
    engine = None
    with suppress(Exception):  # where nothing runs there is nobody to ask
        engine = _engine()
    return _last_line((engine.message if engine else "") or str(error) or repr(error))


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it does not say why")


def _engine() -> Any:
    """What Ray Serve knows of the engines; None where it does not know of them yet."""
    application = serve.status().applications.get(_NAME)
    return application and application.deployments.get(_ENGINE)


def _num_running() -> int:
    engine = _engine()
    return engine.replica_states.get("RUNNING", 0) if engine else 0


def _own_environment() -> dict[str, str]:
    """What was said to this package by variables is said to the replicas too, on whichever machine."""
    return {name: value for name, value in os.environ.items() if name.startswith("OUTRIDER_")}


def _drain(seconds: int) -> None:
    engine = serve.get_deployment_handle(_ENGINE, _NAME)
    log("ending", {})
    books = engine.broadcast("end", seconds).results(timeout_s=seconds + _ENDING_SECONDS, return_exceptions=True)
    log("ended", {"books": [each if isinstance(each, str) else f"unknown: {each!r}" for each in books]})


def _end(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # a second one must not cut off those who are being served
    raise SystemExit(0)
