"""`outrider serve`: the model behind OpenAI's API, in one process or as replicas on Ray Serve."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options
from outrider.cli.flags import Flags, with_options
from outrider.cli.startup import light_imports
from outrider.errors import ContradictionError, InvalidParameterError

if TYPE_CHECKING:
    from outrider.building import Profile
    from outrider.config import ModelConfig
    from outrider.llm import LLM
    from outrider.loading.fit import Needs
    from outrider.server.connections import Listener
    from outrider.server.recorder import RecordFolder
    from outrider.server.replicas.machines import Machine, Share
    from outrider.server.service import Service
    from outrider.server.settings import ServerSettings
    from outrider.server.tenants import ApiKeys

# --- `outrider serve`: the model behind OpenAI's API.


_LOOPBACK = ("127.0.0.1", "::1", "localhost")
#: Limits of connections, which Ray Serve has where there are replicas.
_OF_CONNECTIONS = ("stalled_seconds", "header_seconds", "body_seconds", "max_connections")


@dataclass(frozen=True)
class Reached:
    """These options say where the server is reached, and by whom."""

    host: Annotated[str, typer.Option(help="Address to listen at; others than this machine reach 0.0.0.0.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="0 takes a free one, and 65535 is the highest.")] = 8000
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name under which clients reach the server, beside those of this machine; * for any; may be repeated."
        ),
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="Pages of this origin, like https://chat.example.com, may ask; * for any; may be repeated."),
    ] = None


@dataclass(frozen=True)
class Certificate:
    """These options are for https."""

    ssl_certfile: Annotated[Path | None, typer.Option(help="Certificate, for https.")] = None
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Its key.")] = None

    def options(self) -> dict[str, str]:
        """Names them as uvicorn does; the file of the certificate may hold its key, too. Raises InputError."""
        from outrider.server.run import check_tls

        check_tls(self.ssl_certfile, self.ssl_keyfile or self.ssl_certfile)
        given = {"ssl_certfile": self.ssl_certfile, "ssl_keyfile": self.ssl_keyfile or self.ssl_certfile}
        return {name: str(path) for name, path in given.items() if path is not None}


@with_options()
def serve(
    model: options.Model = None,
    wide: options.Wide = False,
    *,
    drafting: options.TreeDrafting,
    profile: options.Profile = None,
    allow: Annotated[
        list[str] | None, typer.Option(help="A further method that requests may ask for, as in --method; may be repeated.")
    ] = None,
    replicas: Annotated[int | None, typer.Option(help="Engines behind one address; see docs/how-to/replicas.md.")] = None,
    reached: Reached,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    chat_template: options.ChatTemplate = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="A line for each key: tenant:key, and limits behind it. The variable OUTRIDER_API_KEYS may hold them "
            "instead, with commas between them."
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Keep texts of the keys that have record_mib in this folder, as data for `outrider train`."),
    ] = None,
    loading: options.Loading,
    limits: Annotated[dict[str, Any], Flags(("outrider.server.settings:ServerSettings",))],
    certificate: Certificate,
) -> None:
    """Serve a model to everything that speaks to OpenAI's API."""
    given = {name: value for name, value in limits.items() if value is not None}  # others have the usual one
    if replicas is not None:
        check_replicas(replicas, {name: given[name] for name in _OF_CONNECTIONS if name in given}, record)
    if wide:
        served_model_name = served_model_name or "outrider-wide"
        model, paired = options.wide_pair(model, drafting, loading["dtype"])
        drafting = paired if profile is None else drafting
    allowed = [options.speculation(name, None, None, None) for name in allow or []]
    who = drafting.config()
    template = options.template(chat_template)
    # Before the model: what is wrong here is better known now.
    options.check_installed("serve", ("starlette", "uvicorn", "prometheus_client"), "Install outrider[serve].")
    keys, settings = _settings(reached, api_key_file, model_name=served_model_name or _usual_name(model), **given)
    with light_imports():  # of records and routes, which bring all that models need
        records = None if record is None else _record_folder(record, keys)
        tls = certificate.options()
        place = _listen(reached, settings, has_keys=bool(keys), is_single=replicas is None)
    loading["profile"] = profile
    make = partial(_service, model, who, template, settings, allowed, keys)
    if replicas is not None:
        address = {"host": reached.host, "port": place.getsockname()[1]}
        place.close()  # Ray Serve opens it again, in a process of its own
        run_replicas(make, replicas, model, who, loading, settings, keys, **address, **tls)
        return
    from outrider.server.errors import log
    from outrider.server.run import Hangups
    from outrider.server.run import serve as run

    log("loading", {"model": settings.model_name, "from": model or "the embedded pair"})
    hangups = Hangups()  # before the profile is read
    run(make(records=records, **loading), place, hangups, profile=profile, **tls)


def _settings(reached: Reached, key_file: Path | None, **given: Any) -> tuple[ApiKeys, ServerSettings]:
    from outrider.server.access import allowed_hosts, allowed_origins
    from outrider.server.settings import ServerSettings
    from outrider.server.tenants import ApiKeys

    keys = ApiKeys.of(key_file)
    hosts = allowed_hosts(reached.host, reached.allowed_host or (), has_keys=bool(keys))
    return keys, ServerSettings(hosts=hosts, origins=allowed_origins(reached.allow_origin or ()), **given)


def _listen(reached: Reached, settings: ServerSettings, *, has_keys: bool, is_single: bool) -> Listener:
    """Opens a place where clients reach the server. From here on there are lines in the log."""
    from outrider.server.connections import raise_file_limit, room_for_connections
    from outrider.server.errors import log, write_logs
    from outrider.server.run import listen

    files = raise_file_limit()
    most = room_for_connections(files, settings.max_connections)
    place = listen(reached.host, reached.port, settings.stalled_seconds, most)
    write_logs()
    if is_single:
        log("connections have room", {"max_connections": most, "files": files})
    if not has_keys and reached.host not in _LOOPBACK:
        facts = {"host": reached.host}
        log("everybody who reaches this address is served: give --api-key-file", facts, logging.WARNING)
    return place


def _load(model: str | None, settings: Any, template: str | None, **given: Any) -> LLM:
    from rich.console import Console

    console = Console(stderr=True, quiet=not sys.stderr.isatty())  # else the log says it, in JSON
    llm = options.load(console, model, settings, chats=True, **given)
    options.use_template(llm, template)
    return llm


def _service(
    model: str | None,
    settings: Any,
    template: str | None,
    limits: ServerSettings,
    allowed: list[Any],
    keys: ApiKeys,
    records: RecordFolder | None = None,
    **given: Any,
) -> Service:
    """The model, loaded, as the routes see it. With --replicas this runs in the process of each of them."""
    from outrider.async_llm import AsyncLLM
    from outrider.server.requests import AllowedMethods
    from outrider.server.service import Service

    llm = _load(model, settings, template, **given)
    methods = AllowedMethods(llm.speculation, [llm.resolve(config) for config in allowed])
    for config in allowed:
        llm.load_method(config)  # one that cannot be had is better known now than at the first request
    return Service(AsyncLLM(llm), limits, methods, keys, records)


def _record_folder(path: Path, keys: ApiKeys) -> RecordFolder:
    """The folder of the records, which no other server has."""
    from outrider.server.recorder import RecordFolder

    if not any(keys.record_budgets.values()):
        remedy = "Write record_mib=64, say, behind the keys whose texts may be kept, or leave --record out."
        raise ContradictionError("record", str(path), "no key allows it", remedy)
    return RecordFolder(path)


def _usual_name(model: str | None) -> str:
    """A hub id as it is; of a folder its name alone."""
    if model is None:
        return "outrider-embedded"
    return os.path.basename(os.path.normpath(model)) if os.path.isdir(model) else model


# --- What `outrider serve --replicas` does beside `outrider serve`: it shares the machine between engines on Ray Serve.


def check_replicas(count: int, connections: dict[str, float], record: Path | None) -> None:
    """Raise where so many replicas cannot be, or not here."""
    if count < 1:
        raise InvalidParameterError("replicas", count, "somebody must write", "Use 1 or more, or leave --replicas out.")
    for name, value in connections.items():
        problem = "with --replicas Ray Serve has the connections, and it knows no such limit"
        raise ContradictionError(name, value, problem, "Leave one of them out.")
    if record is not None:
        problem = "with --replicas several servers would write to one folder"
        raise ContradictionError("record", str(record), problem, "Leave one of them out.")
    options.check_installed("serve --replicas", ("ray",), "Install outrider[serve,ray].")


def run_replicas(
    make: Callable[..., Service],
    count: int,
    model: str | None,
    settings: Any,
    given: dict[str, Any],
    limits: ServerSettings,
    keys: ApiKeys,
    **how: Any,
) -> None:
    """Serve with several engines behind one address.

    Args:
        model: Folder or hub id of the target; None for the embedded pair.
    """
    from outrider.server.errors import log

    log("loading", {"model": limits.model_name, "replicas": count})  # what comes now takes its time
    from outrider.building import read_profile
    from outrider.loading.configuration import read_context
    from outrider.server.replicas.machines import check_cluster, keep_cluster_local, own_machine, share, threads_of

    target = _target(model, given)
    profile, recommended = (None, settings) if given["profile"] is None else read_profile(given["profile"])
    needed = _needed(target, _draft_model(model, recommended))
    most_tokens = given["max_num_seqs"] * read_context(target)

    def shared(machines: list[Machine]) -> Share:
        return share(target.model, needed, count, machines, given["kv_cache_tokens"], most_tokens)

    own, address = own_machine(given["device"]), os.environ.get("RAY_ADDRESS")
    each = None if address else shared([own])  # before anything starts
    if address:
        check_cluster(address)
    else:
        keep_cluster_local()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would tell its makers about this cluster
    from outrider.server.replicas.run import cluster, cluster_machines, serve_replicas

    with cluster():
        each = each or shared(cluster_machines())
        if profile is not None:
            _say_if_ignored(profile, threads_of(each))
        ready = partial(make, **{**given, "kv_cache_tokens": each.kv_tokens})
        slack = max(1, given["max_num_seqs"] // 2)
        serve_replicas(ready, count, each, limits, keys, slack=slack, **how)


def _target(model: str | None, given: dict[str, Any]) -> ModelConfig:
    """Returns how each replica loads the target."""
    from outrider.config import ModelConfig, default_model, part_of

    return ModelConfig(model=model or default_model("target"), **part_of(ModelConfig, given))


def _needed(target: ModelConfig, draft: str | None) -> list[Needs]:
    """Returns what the models of one replica take of memory, where that is known."""
    from outrider.loading.configuration import read_needs

    configs = [target] if draft is None else [target, target.replace(model=draft, max_model_len=None)]
    return [each for each in map(read_needs, configs) if each is not None]


def _say_if_ignored(profile: Profile, threads: str) -> None:
    """Log a warning where the replicas have another number of threads than the profile. They ignore it then, and their own
    warnings go to files of Ray that nobody reads."""
    from outrider.server.errors import log

    if str(profile.identity.threads) != threads.split(",")[0]:
        facts = {
            "made_with_threads": profile.identity.threads,
            "threads_of_a_replica": threads,
            "remedy": f"Make it with OMP_NUM_THREADS={threads} outrider tune ...",
        }
        log("the replicas ignore the profile", facts, logging.WARNING)


def _draft_model(model: str | None, settings: Any) -> str | None:
    """The model that drafts; None where none does."""
    from outrider.config import default_model
    from outrider.propose.defaults import SpeculationDefaults

    asked = {"method": "draft_model", **settings} if isinstance(settings, dict) else settings
    draft = SpeculationDefaults.of(asked, None, default_model("draft") if model is None else None).draft
    return None if draft is None else draft.model
