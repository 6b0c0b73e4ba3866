"""What `outrider serve --replicas` does beside `outrider serve`: it shares the machine between engines on Ray Serve."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import ContradictionError, InvalidParameterError, MissingExtraError

if TYPE_CHECKING:
    from outrider.config import ModelConfig
    from outrider.model.loading.fit import Needs
    from outrider.profile import Profile
    from outrider.server.replicas.capacity import Machine, Share
    from outrider.server.service import Service
    from outrider.server.settings import ServerSettings
    from outrider.server.tenancy.keys import ApiKeys

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


def check_replicas(count: int, stalled_seconds: int | None, record: Path | None) -> None:
    """Raise where so many replicas cannot be, or not here."""
    if count < 1:
        raise InvalidParameterError("replicas", count, "somebody must write", "Use 1 or more, or leave --replicas out.")
    if stalled_seconds is not None:
        problem = "with --replicas Ray Serve has the connections, and it knows no such limit"
        raise ContradictionError("stalled_seconds", stalled_seconds, problem, "Leave one of them out.")
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
    from outrider.server.logs import log

    log("loading", {"model": limits.model_name, "replicas": count})  # what comes now takes its time
    from outrider.model.loading.configuration import read_context
    from outrider.profile import read_profile
    from outrider.server.replicas.capacity import check_cluster, own_machine, share, threads_of
    from outrider.server.replicas.loopback import keep_cluster_local

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
    from outrider.config import ModelConfig
    from outrider.embedded import default_model

    return ModelConfig(model=model or default_model("target"), **{name: given[name] for name in _TARGET_SETTINGS})


def _needed(target: ModelConfig, draft: str | None) -> list[Needs]:
    """What the models of one replica take of memory, where that is known."""
    from outrider.model.loading.configuration import read_needs

    configs = [target] if draft is None else [target, target.replace(model=draft, max_model_len=None)]
    return [each for each in map(read_needs, configs) if each is not None]


def _say_if_ignored(profile: Profile, threads: str) -> None:
    """Log a warning where the replicas have another number of threads than the profile. They ignore it then, and their own
    warnings go to files of Ray that nobody reads."""
    from outrider.server.logs import log

    if str(profile.identity.threads) != threads.split(",")[0]:
        facts = {
            "made_with_threads": profile.identity.threads,
            "threads_of_a_replica": threads,
            "remedy": f"Make it with OMP_NUM_THREADS={threads} outrider tune ...",
        }
        log("the replicas ignore the profile", facts, logging.WARNING)


def _draft_model(model: str | None, settings: Any) -> str | None:
    """The model that drafts; None where none does."""
    from outrider.embedded import default_model
    from outrider.propose.defaults import SpeculationDefaults

    asked = {"method": "draft_model", **settings} if isinstance(settings, dict) else settings
    draft = SpeculationDefaults.of(asked, None, default_model("draft") if model is None else None).draft
    return None if draft is None else draft.model
