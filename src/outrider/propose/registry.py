"""Proposers by name: the built-in ones, loaded on first use, and those that installed packages bring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points

from outrider.config import SpeculationConfig
from outrider.errors import InvalidParameterError, OutriderError, ProposerError
from outrider.model.runner import ModelRunner
from outrider.propose.base import Proposer, TargetFacts

ENTRY_POINT_GROUP = "outrider.proposers"


@dataclass(frozen=True)
class ProposerContext:
    """What a factory may use to build a proposer.

    Attributes:
        config: The speculation settings that ask for it.
        target: Facts about the target.
        max_num_batched_tokens: Rows a pass may hold.
        load_runner: Loads another model with KV memory of its own, by path or hub id and dtype.
    """

    config: SpeculationConfig
    target: TargetFacts
    max_num_batched_tokens: int
    load_runner: Callable[[str, str | None], ModelRunner]


ProposerFactory = Callable[[ProposerContext], Proposer]


def _draft_model(context: ProposerContext) -> Proposer:
    from outrider.propose.draft_model import DraftModelProposer, check_vocabulary

    if context.config.draft_model is None:
        raise InvalidParameterError("draft_model", None, "proposer='draft_model' needs one", "Give a folder or a hub id.")
    runner = context.load_runner(context.config.draft_model, context.config.draft_dtype)
    check_vocabulary(runner.loaded, context.target)
    return DraftModelProposer(runner, context.target.vocab_size, context.max_num_batched_tokens)


def _ngram(context: ProposerContext) -> Proposer:
    from outrider.propose.ngram import NgramProposer

    return NgramProposer(context.config.ngram_max, context.config.ngram_min)


def _suffix(context: ProposerContext) -> Proposer:
    from outrider.propose.suffix import SharedTexts, SuffixProposer

    config = context.config
    shared = SharedTexts(config.suffix_cache_mib * 2**20) if config.suffix_shared else None
    return SuffixProposer(config.suffix_min_match, config.suffix_factor, tree=config.suffix_tree, shared=shared)


_factories: dict[str, ProposerFactory] = {"draft_model": _draft_model, "ngram": _ngram, "suffix": _suffix}


def register(name: str, factory: ProposerFactory) -> None:
    """Make a proposer available as SpeculationConfig(proposer=name) in this process."""
    _factories[name] = factory


def names() -> list[str]:
    """Every proposer that can be asked for, "none" included."""
    return sorted({"none", *_factories, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def build(context: ProposerContext) -> Proposer:
    """Build the proposer that `context.config` names.

    Raises:
        InvalidParameterError: No such proposer.
        ProposerError: Its factory failed.
    """
    name = context.config.proposer
    try:
        return _find(name)(context)
    except OutriderError:
        raise
    except Exception as error:
        raise ProposerError(f"proposer {name!r} cannot be built: {error}") from error


def check_name(name: str) -> None:
    """Raise InvalidParameterError unless `name` is a proposer or "none"."""
    if name not in names():
        raise InvalidParameterError("proposer", name, "no such proposer", f"Known: {', '.join(names())}.")


def _find(name: str) -> ProposerFactory:
    if name in _factories:
        return _factories[name]
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        factory: ProposerFactory = point.load()
        return factory
    raise InvalidParameterError("proposer", name, "no such proposer", f"Known: {', '.join(names())}.")
