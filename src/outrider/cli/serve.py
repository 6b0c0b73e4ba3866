"""`outrider serve`: the model behind OpenAI's API, in one process or as replicas on Ray Serve."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options
from outrider.errors import ContradictionError, InvalidParameterError, MissingExtraError

if TYPE_CHECKING:
    from outrider.building import Profile
    from outrider.config import ModelConfig
    from outrider.llm import LLM
    from outrider.loading.fit import Needs
    from outrider.server.connections import Listener
    from outrider.server.recorder import RecordFolder
    from outrider.server.replicas.machines import Machine, Share
    from outrider.server.requests import ServerSettings
    from outrider.server.service import Service
    from outrider.server.tenants import ApiKeys

# --- `outrider serve`: the model behind OpenAI's API.


_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_STALLED_SECONDS = 60

Allow = Annotated[
    list[str] | None, typer.Option(help="A further method that requests may ask for, as in --method; may be repeated.")
]
Replicas = Annotated[int | None, typer.Option(help="Engines behind one address; see docs/how-to/replicas.md.")]
Host = Annotated[str, typer.Option(help="Address to listen at; others than this machine reach 0.0.0.0.")]
AllowedHost = Annotated[
    list[str] | None,
    typer.Option(
        help="A name under which clients reach the server, beside those of this machine; * for any; may be repeated."
    ),
]
AllowOrigin = Annotated[
    list[str] | None,
    typer.Option(help="Pages of this origin, like https://chat.example.com, may ask; * for any; may be repeated."),
]
Port = Annotated[int, typer.Option(help="0 takes a free one, and 65535 is the highest.")]
Name = Annotated[str | None, typer.Option(help="What clients call the model.")]
Template = Annotated[Path | None, typer.Option(help="A file with a chat template, in place of the model's.")]
ToolParser = Annotated[str | None, typer.Option(help="How the model writes calls of tools; its chat template tells.")]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        help="A line for each key: tenant:key, and limits behind it. The variable OUTRIDER_API_KEYS may hold them instead, "
        "with commas between them."
    ),
]
Record = Annotated[
    Path | None,
    typer.Option(help="Keep texts of the keys that have record_mib in this folder, as data for `outrider train`."),
]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest text, prompt and output together.")]
MaxNumSeqs = Annotated[int, typer.Option(help="Texts that are written at a time.")]
MaxRows = Annotated[int, typer.Option(help="Rows of a pass.")]
KVTokens = Annotated[int | None, typer.Option(help="KV memory; sized from free memory unless given.")]
StateCache = Annotated[
    int | None,
    typer.Option(help="MiB for running states that equal beginnings share; a sixteenth of free memory unless given."),
]
NoPrefixCaching = Annotated[
    bool,
    typer.Option(
        "--no-prefix-caching",
        help="Read every prompt anew. Otherwise prompts of a tenant share the KV of equal beginnings.",
    ),
]
MaxQueue = Annotated[int, typer.Option(help="Texts of a tenant that may wait beside these; further ones get 429.")]
MaxN = Annotated[int, typer.Option(help="Texts of one request.")]
MaxBody = Annotated[int, typer.Option(help="Of one request.")]
MaxValues = Annotated[int, typer.Option(help="Names and values in the body of one request.")]
MaxItems = Annotated[int, typer.Option(help="Entries of logit_bias, of bad_words, or of a list of token ids.")]
MaxStops = Annotated[int, typer.Option(help="Stop strings of one request.")]
MaxStructure = Annotated[int, typer.Option(help="Of a JSON schema, a regular expression or a grammar.")]
MaxCharacters = Annotated[int, typer.Option(help="Characters of all stop strings, or of all bad_words.")]
StepSeconds = Annotated[float, typer.Option(help="An engine whose step takes longer hangs: /health says so.")]
RequestSeconds = Annotated[
    float | None, typer.Option(help="A request that takes longer, from its first byte on, is ended.")
]
HeaderSeconds = Annotated[
    float | None, typer.Option(help="A connection without the headers of a request is ended then; 30 unless given.")
]
BodySeconds = Annotated[float | None, typer.Option(help="A body that takes longer to come is refused; 60 unless given.")]
TemplateSeconds = Annotated[float, typer.Option(help="CPU that the chat template may take for one conversation.")]
TemplateMib = Annotated[int, typer.Option(help="Memory that it may take.")]
MaxConnections = Annotated[
    int | None, typer.Option(help="Connections at a time; as many as files leave room for, up to 16384, unless given.")
]
DrainSeconds = Annotated[int, typer.Option(help="How long requests may finish after SIGTERM.")]
StalledSeconds = Annotated[
    int | None, typer.Option(help="A client that takes nothing for so long is cut off; 60 unless given.")
]
Certificate = Annotated[Path | None, typer.Option(help="Certificate, for https.")]
CertificateKey = Annotated[Path | None, typer.Option(help="Its key.")]

#: Options of the command that are passed on as they are, to the model and to the server's limits.
_LOADING = (
    "profile",
    "dtype",
    "device",
    "attention_backend",
    "quantization",
    "activations",
    "draft_quantization",
    "batch_invariant",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_tokens",
    "prefix_caching",
    "state_cache_mib",
)
_LIMITS = (
    "max_queue",
    "max_n",
    "max_list_items",
    "max_list_characters",
    "max_stops",
    "max_structure_bytes",
    "max_body_bytes",
    "max_body_values",
    "step_seconds",
    "request_seconds",
    "header_seconds",
    "body_seconds",
    "template_seconds",
    "template_mib",
    "tool_parser",
)


def serve(
    model: options.Model = None,
    wide: options.Wide = False,
    method: options.Method = None,
    draft_model: options.DraftModel = None,
    num_draft_tokens: options.NumDraftTokens = None,
    rule: options.Rule = None,
    tree: options.Tree = None,
    profile: options.Profile = None,
    allow: Allow = None,
    replicas: Replicas = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    allowed_host: AllowedHost = None,
    allow_origin: AllowOrigin = None,
    served_model_name: Name = None,
    chat_template: Template = None,
    tool_parser: ToolParser = None,
    api_key_file: KeyFile = None,
    record: Record = None,
    dtype: options.DType = "auto",
    device: options.Device = None,
    attention_backend: options.Backend = "auto",
    quantization: options.Quantization = None,
    activations: options.Activations = None,
    draft_quantization: options.DraftQuantization = None,
    batch_invariant: options.BatchInvariant = False,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 32,
    max_num_batched_tokens: MaxRows = 1024,
    kv_cache_tokens: KVTokens = None,
    no_prefix_caching: NoPrefixCaching = False,
    state_cache_mib: StateCache = None,
    max_queue: MaxQueue = 256,
    max_n: MaxN = 16,
    max_body_bytes: MaxBody = 4 * 2**20,
    max_body_values: MaxValues = 100_000,
    max_list_items: MaxItems = 1024,
    max_list_characters: MaxCharacters = 16 * 2**10,
    max_stops: MaxStops = 16,
    max_structure_bytes: MaxStructure = 64 * 2**10,
    step_seconds: StepSeconds = 120.0,
    request_seconds: RequestSeconds = None,
    header_seconds: HeaderSeconds = None,
    body_seconds: BodySeconds = None,
    max_connections: MaxConnections = None,
    template_seconds: TemplateSeconds = 2.0,
    template_mib: TemplateMib = 512,
    drain_seconds: DrainSeconds = 30,
    stalled_seconds: StalledSeconds = None,
    ssl_certfile: Certificate = None,
    ssl_keyfile: CertificateKey = None,
) -> None:
    """Serve a model to everything that speaks to OpenAI's API."""
    _check_seconds("drain_seconds", drain_seconds, 0)
    _check_seconds("stalled_seconds", stalled_seconds, 1)
    if replicas is not None:
        of_connections = {
            "header_seconds": header_seconds,
            "body_seconds": body_seconds,
            "max_connections": max_connections,
        }
        check_replicas(replicas, {"stalled_seconds": stalled_seconds, **of_connections}, record)
    if wide:
        served_model_name = served_model_name or "outrider-wide"
        model, usual = options.wide_pair(model, method, draft_model, dtype)
        draft_model = usual if profile is None else draft_model
    if ssl_certfile is not None and ssl_keyfile is None:
        ssl_keyfile = ssl_certfile  # which then holds both
    given = dict(locals())
    allowed = [options.speculation(name, None, None, None) for name in allow or []]
    settings = options.speculation(method, draft_model, num_draft_tokens, rule, tree)
    template = None if chat_template is None else _template(chat_template)
    given["prefix_caching"] = not no_prefix_caching
    limits, keys, records, place = _open(given)  # before the model: what is wrong here is better known now
    loading = {name: given[name] for name in _LOADING}
    tls = {name: str(given[name]) for name in ("ssl_certfile", "ssl_keyfile") if given[name] is not None}
    make = partial(_service, model, settings, template, limits, allowed, keys)
    if replicas is not None:
        address = {"host": host, "port": place.getsockname()[1]}
        place.close()  # Ray Serve opens it again, in a process of its own
        run_replicas(make, replicas, model, settings, loading, limits, keys, drain_seconds=drain_seconds, **address, **tls)
        return
    from outrider.server.errors import log
    from outrider.server.run import Hangups
    from outrider.server.run import serve as run

    log("loading", {"model": limits.model_name, "from": model or "the embedded pair"})
    hangups = Hangups()  # before the profile is read
    run(make(records=records, **loading), place, hangups, drain_seconds=drain_seconds, profile=profile, **tls)


def _open(given: dict[str, Any]) -> tuple[ServerSettings, ApiKeys, RecordFolder | None, Listener]:
    """The server's settings, its keys, the folder of its records if any, and a place where clients reach it, from the
    options of the command."""
    _check_installed()
    from outrider.server.access import allowed_hosts, allowed_origins
    from outrider.server.connections import raise_file_limit, room_for_connections
    from outrider.server.errors import log, write_logs
    from outrider.server.requests import ServerSettings
    from outrider.server.run import check_tls, listen
    from outrider.server.tenants import ApiKeys

    name = given["served_model_name"] or _usual_name(given["model"])
    keys, host = ApiKeys.of(given["api_key_file"]), given["host"]
    hosts = allowed_hosts(host, given["allowed_host"] or (), has_keys=bool(keys))
    origins = allowed_origins(given["allow_origin"] or ())
    limits = ServerSettings(model_name=name, hosts=hosts, origins=origins, **_given(given, _LIMITS))
    records = None if given["record"] is None else _record_folder(given["record"], keys)
    check_tls(given["ssl_certfile"], given["ssl_keyfile"])
    files = raise_file_limit()
    most = room_for_connections(files, given["max_connections"])
    place = listen(host, given["port"], given["stalled_seconds"] or _STALLED_SECONDS, most)
    write_logs()
    if given["replicas"] is None:
        log("connections have room", {"max_connections": most, "files": files})
    if not keys and host not in _LOOPBACK:
        log("everybody who reaches this address is served: give --api-key-file", {"host": host}, logging.WARNING)
    return limits, keys, records, place


def _given(options: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Those of the options that have a value; others have the usual one."""
    return {name: options[name] for name in names if options[name] is not None}


def _load(model: str | None, settings: Any, template: str | None, **given: Any) -> LLM:
    from rich.console import Console

    llm = options.load(Console(stderr=True), model, settings, chats=True, **given)
    if template is not None:
        if llm.tokenizer is None:
            raise InvalidParameterError("chat_template", "...", "the model has no tokenizer", "Leave it out.")
        llm.tokenizer.chat_template = template
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
    """The folder of the records, which no other server has.

    Raises:
        ContradictionError: No key allows it.
        InvalidParameterError, StorageError: The folder cannot be had.
    """
    from outrider.server.recorder import RecordFolder

    if not any(keys.record_budgets.values()):
        remedy = "Write record_mib=64, say, behind the keys whose texts may be kept, or leave --record out."
        raise ContradictionError("record", str(path), "no key allows it", remedy)
    return RecordFolder(path)


def _check_seconds(name: str, value: int | None, least: int) -> None:
    """Raise InvalidParameterError where a time is too short. Ranges of typer's own would make the help too wide."""
    if value is not None and value < least:
        raise InvalidParameterError(name, value, "out of range", f"Use {least} or more.")


def _check_installed() -> None:
    """Raise MissingExtraError where the packages of the server are missing."""
    from importlib.util import find_spec

    for name in ("starlette", "uvicorn", "prometheus_client"):
        if find_spec(name) is None:
            raise MissingExtraError("outrider serve", f"the package {name} is not installed", "Install outrider[serve].")


def _usual_name(model: str | None) -> str:
    """A hub id as it is; of a folder its name alone."""
    if model is None:
        return "outrider-embedded"
    return os.path.basename(os.path.normpath(model)) if os.path.isdir(model) else model


def _template(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"it cannot be read ({getattr(error, 'strerror', None) or error})"
        remedy = "Give a file in UTF-8 that holds a Jinja template."
        raise InvalidParameterError("chat_template", str(path), problem, remedy) from None


# --- What `outrider serve --replicas` does beside `outrider serve`: it shares the machine between engines on Ray Serve.


_TARGET_SETTINGS = (
    "dtype",
    "device",
    "attention_backend",
    "max_model_len",
    "quantization",
    "activations",
    "draft_quantization",
    "batch_invariant",
)


def check_replicas(count: int, connections: dict[str, float | None], record: Path | None) -> None:
    """Raise where so many replicas cannot be, or not here."""
    if count < 1:
        raise InvalidParameterError("replicas", count, "somebody must write", "Use 1 or more, or leave --replicas out.")
    for name, value in connections.items():
        if value is not None:
            problem = "with --replicas Ray Serve has the connections, and it knows no such limit"
            raise ContradictionError(name, value, problem, "Leave one of them out.")
    if record is not None:
        problem = "with --replicas several servers would write to one folder"
        raise ContradictionError("record", str(record), problem, "Leave one of them out.")
    from importlib.util import find_spec

    if find_spec("ray") is None:
        remedy = "Install outrider[serve,ray]."
        raise MissingExtraError("outrider serve --replicas", "the package ray is not installed", remedy)


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
        make: Makes the service of one replica, in its own process, from the options that say how to load.
        count: Engines.
        model: Folder or hub id of the target; None for the embedded pair.
        settings: Who drafts, as the command's options say.
        given: Options that say how to load.
        limits: The server's.
        keys: Who may ask.
        how: Address, certificate and time to finish, as `serve_replicas` takes them.

    Raises:
        ModelError: A checkpoint cannot be used, or the machine is too small for so many.
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
    """How each replica loads the target."""
    from outrider.config import ModelConfig, default_model

    return ModelConfig(model=model or default_model("target"), **{name: given[name] for name in _TARGET_SETTINGS})


def _needed(target: ModelConfig, draft: str | None) -> list[Needs]:
    """What the models of one replica take of memory, where that is known."""
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
