"""Starts, watches and ends the cluster: an ingress, and engines in processes of their own."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager, suppress
from time import monotonic
from types import FrameType
from typing import Any, NoReturn

import ray
from ray import serve
from ray.serve.config import HTTPOptions, ProxyLocation, RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from outrider.errors import EngineDiedError, OtherEngineError
from outrider.server.app import make_app
from outrider.server.errors import log, write_logs
from outrider.server.replicas.ingress import Ingress, Inside
from outrider.server.replicas.machines import Machine, Share, keep_replica_local, threads_of
from outrider.server.replicas.routing import Opening, Parcel, PrefixIndex
from outrider.server.service import Service
from outrider.server.settings import ServerSettings
from outrider.server.streams import PARTING_SECONDS
from outrider.server.tenants import ApiKeys

# --- Starts and ends the cluster: an ingress and the replicas.


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
    """A cluster of Ray on this machine, or the one that the variable RAY_ADDRESS names; that one goes on afterwards."""
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
    **http: Any,
) -> None:
    """Serve until SIGTERM or Ctrl-C inside a cluster, then refuse what is new and let those who are being served finish."""
    options = HTTPOptions(**http)
    with ExitStack() as stack:
        try:
            serve.start(ProxyLocation.HeadOnly, options)
            look = stack.enter_context(watched(count, _num_running))
            serve.run(_application(make, count, shared, settings, keys, slack), name=_NAME, route_prefix="/")
        except Exception as error:
            problem = f"the replicas do not start ({_reason(error)})"
            raise OtherEngineError("Ray Serve", problem, "Correct what it names.") from error
        stack.callback(_drain, settings.drain_seconds)
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
    """Returns what stands in the last line of a traceback: of the replica that did not start, or of the error itself."""
    engine = None
    with suppress(Exception):  # where nothing runs there is nobody to ask
        engine = _engine()
    return _last_line((engine.message if engine else "") or str(error) or repr(error))


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it does not say why")


def _engine() -> Any:
    """Returns what Ray Serve knows of the engines; None where it does not know of them yet."""
    application = serve.status().applications.get(_NAME)
    return application and application.deployments.get(_ENGINE)


def _num_running() -> int:
    engine = _engine()
    return engine.replica_states.get("RUNNING", 0) if engine else 0


def _own_environment() -> dict[str, str]:
    """Returns what was said to this package by variables is said to the replicas too, on whichever machine."""
    return {name: value for name, value in os.environ.items() if name.startswith("OUTRIDER_")}


def _drain(seconds: int) -> None:
    engine = serve.get_deployment_handle(_ENGINE, _NAME)
    log("ending", {})
    books = engine.broadcast("end", seconds).results(timeout_s=seconds + _ENDING_SECONDS, return_exceptions=True)
    log("ended", {"books": [each if isinstance(each, str) else f"unknown: {each!r}" for each in books]})


def _end(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # a second one must not cut off those who are being served
    raise SystemExit(0)


# --- Logs how many replicas run, while they start and when one is lost.


#: How often they are counted. A replica that was lost takes longer than that to be replaced.
_SECONDS = 0.5


@contextmanager
def watched(count: int, num_running: Callable[[], int]) -> Iterator[Callable[[], None]]:
    """Within the block, log how many replicas run whenever that changes.

    Yields:
        What looks at once, and not only at the next turn.
    """
    over, lock = threading.Event(), threading.Lock()
    known: int | None = None

    def look() -> None:
        nonlocal known
        with lock, suppress(Exception):  # who serves tells of an error; here it means only that nothing is known
            found = num_running()
            if found != known:
                _tell(known, found, count)
                known = found

    def watch() -> None:
        look()
        while not over.wait(_SECONDS):
            look()

    thread = threading.Thread(target=watch, name="outrider-watch", daemon=True)
    thread.start()
    try:
        yield look
    finally:
        over.set()
        thread.join()


def _tell(before: int | None, running: int, count: int) -> None:
    facts = {"running": running, "replicas": count}
    if before is not None and running < before:
        log("a replica was lost", facts, logging.ERROR)
    else:
        log("replicas run" if running else "replicas start", facts)


# --- An engine in a process of its own, without a socket.


class EngineReplica:
    """One replica of the engine, with the routes of a server."""

    def __init__(self, make: Callable[[], Service]) -> None:
        write_logs()
        keep_replica_local()
        self._service = make()
        self._inside = Inside(make_app(self._service))

    async def answer(self, parcel: Parcel) -> AsyncGenerator[Opening | bytes, None]:
        """The answer to a request; see Inside.answer."""
        async with aclosing(self._inside.answer(parcel)) as parts:
            async for part in parts:
                yield part

    def check_health(self) -> None:
        """Called by Ray Serve now and then, which replaces a replica that raises."""
        if self._service.status == "dead":
            raise EngineDiedError

    async def metrics(self) -> tuple[str, str]:
        """The name of this replica, and its metrics for Prometheus."""
        name: str = serve.get_replica_context().replica_id.unique_id
        return name, (await self._service.metrics_text()).decode()

    async def end(self, seconds: float) -> str:
        """Refuse what is new, let the texts under way finish, and let the engine go.

        Returns:
            Whether anything is still held for texts that have ended, as Service.end says it.
        """
        self._service.draining = True
        await self._rest(seconds)
        self._service.deadlines.end_all()
        await self._rest(PARTING_SECONDS)
        self._inside.cut_off()
        return await self._service.end()

    async def _rest(self, seconds: float) -> None:
        """Wait until nobody is being answered, or for so long."""
        until = monotonic() + seconds
        while (self._service.is_busy or self._inside.num_open) and monotonic() < until:
            await asyncio.sleep(0.05)


# --- Adapts our router to Ray Serve's interface.
#
# Ray copies the module of a router by value, so what messages are instances of must be in another module.


class PrefixRouter(RequestRouter):
    """Sends a request where the longest beginning of its prompt was read, and otherwise to the least loaded replica."""

    def initialize_state(self, slack: int, **_: Any) -> None:
        """Called by Ray Serve before the first request; see PrefixIndex for `slack`."""
        self._index: PrefixIndex[ReplicaID] = PrefixIndex(slack)
        self._loads: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas in the order in which they are to be tried, each a rank of its own."""
        pieces = _pieces(pending_request)
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        ranked = self._index.choose(pieces, {replica: self._loads[replica] for replica in replicas})
        # Noted now, and not when it was sent: the next request with this beginning may come before that.
        self._index.add(ranked[0], pieces)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # wait a while before all are tried again
        return [[replicas[replica]] for replica in ranked]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """A request has gone to a replica."""
        super().on_send_request(replica_id)
        self._loads[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A replica has answered, or has failed to."""
        super().on_request_completed(replica_id, internal_request_id)
        self._loads[replica_id] = max(0, self._loads[replica_id] - 1)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Replicas have come or gone."""
        super().update_replicas(replicas)
        alive = [replica.replica_id for replica in replicas]
        self._index.keep(alive)
        self._loads = Counter({replica: self._loads[replica] for replica in alive})


def _pieces(pending_request: PendingRequest | None) -> Sequence[bytes]:
    args = () if pending_request is None else pending_request.args
    return args[0].beginnings if args and isinstance(args[0], Parcel) else ()
