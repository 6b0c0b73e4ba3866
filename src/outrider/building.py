"""Builds an engine: loads the model, sizes its memory, builds its proposers and applies a profile."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from os import PathLike, fspath
from typing import Any, NamedTuple

import torch

from outrider.config import CacheConfig, ModelConfig, SchedulerConfig
from outrider.embedded import default_model
from outrider.engine.engine import Engine
from outrider.engine.proposing.proposers import ProposerSet
from outrider.errors import ContradictionError, InputError
from outrider.model.factory import make_runner
from outrider.model.loading.draft_loader import DraftLoader
from outrider.model.loading.from_module import check_given
from outrider.model.loading.loaded_model import LoadedModel
from outrider.model.loading.loader import adopt_model, load_model
from outrider.model.loading.sources import check_sources
from outrider.model.memory import Beside
from outrider.model.runner import ModelRunner
from outrider.model.target import Target
from outrider.options import Speculation
from outrider.params import SamplingParams
from outrider.profile import Identity, Profile, read_profile
from outrider.prompts import PromptEncoder
from outrider.propose.compositions import parts_of
from outrider.propose.defaults import SpeculationDefaults
from outrider.propose.methods.draft_model import draft_models
from outrider.propose.speculation import SpeculationConfig

logger = logging.getLogger(__name__)


class BuiltEngine(NamedTuple):
    """An engine, and what is known of its model now that it is loaded.

    Attributes:
        engine: It has no work yet.
        prompts: Turns prompts and conversations into token ids.
        default_params: The parameters of requests that bring none.
        defaults: Who drafts where a call leaves it open, by the profile if it holds here.
    """

    engine: Engine
    prompts: PromptEncoder
    default_params: SamplingParams
    defaults: SpeculationDefaults


class RecommendedSettings(NamedTuple):
    """A profile as it was read.

    Attributes:
        path: Its file.
        profile: For which model and which machine it was made.
        config: The settings that it recommends.
    """

    path: str
    profile: Profile
    config: SpeculationConfig

    @classmethod
    def read(
        cls, path: str | PathLike[str], speculation: Speculation | None, draft_model: str | PathLike[str] | None
    ) -> RecommendedSettings:
        """Read a profile, which takes the place of both other arguments; raises InputError."""
        for name, value in (("speculation", speculation), ("draft_model", draft_model)):
            if value is not None:
                raise ContradictionError(name, value, "the profile says who drafts", "Leave one of them out.")
        return cls(str(path), *read_profile(path))


@dataclass(frozen=True)
class EnginePlan:
    """What an engine is to be built of, checked as far as it can be before a weight is read.

    Attributes:
        model, cache, scheduling: Their settings.
        defaults: Who drafts where a call leaves it open.
        recommended: A profile that may say so instead.
        embedded: Whether the model is the one that comes with the package.
    """

    model: ModelConfig
    cache: CacheConfig
    scheduling: SchedulerConfig
    defaults: SpeculationDefaults
    recommended: RecommendedSettings | None
    embedded: bool

    def build(self, model: Any, tokenizer: Any | None, draft_model: Any | None, *, consume: bool) -> BuiltEngine:
        """Load everything, in the thread that will run the engine.

        Args:
            model, tokenizer, draft_model, consume: As `LLM` takes them.

        Raises:
            InputError, ModelError: A setting or a checkpoint cannot be used.
        """
        config = self.model
        loaded = self._load(model, tokenizer, consume=consume)
        given = {draft_name(draft_model): draft_model} if isinstance(draft_model, torch.nn.Module) else {}
        drafts = DraftLoader(loaded, config, self.cache, self.scheduling, given)
        runner = make_runner(
            loaded,
            config.attention_backend,
            self.cache,
            self.scheduling,
            batch_invariant=config.batch_invariant,
            beside=self._beside(loaded, drafts),
        )
        drafts.serve(runner)
        defaults = self._defaults_for(runner)
        longest = loaded.max_model_len if loaded.encoder is None else loaded.encoder.max_source_len
        prompts = PromptEncoder(loaded.tokenizer, None if self.embedded else config.model, longest)
        default_params = checkpoint_params(loaded)
        proposers = ProposerSet(Target(runner), self.scheduling.max_num_batched_tokens, drafts, defaults.kept)
        engine = Engine(runner, self.scheduling, proposers)
        engine.load_method(defaults.config)  # what cannot be used is better known now than at the first prompt
        return BuiltEngine(engine, prompts, default_params, defaults)

    def _beside(self, loaded: LoadedModel, drafts: DraftLoader) -> Beside:
        """What all proposers that are known already take beside the target: their layers, and draft models."""
        configs = [self.defaults.config] if self.recommended is None else [self.defaults.config, self.recommended.config]
        parts = [part for config in configs for each in config.candidates for part in parts_of(each)]
        added = sum(part.method.added_token_bytes(loaded) for part in parts if part.method is not None)
        models = {method.identity: method for part in parts for method in draft_models(part) if method.model is not None}
        needed = [found for method in models.values() if (found := drafts.needs(**method.model_settings)) is not None]
        by_token = added + sum(found.kv_token_bytes for found in needed)
        return Beside(by_token, sum(found.weight_bytes for found in needed))

    def _load(self, model: Any, tokenizer: Any | None, *, consume: bool) -> LoadedModel:
        if isinstance(model, torch.nn.Module):
            return adopt_model(model, self.model, tokenizer, consume=consume)
        if consume:
            raise ContradictionError(
                "consume",
                consume,
                "there is no loaded model whose weights could be taken",
                "Leave it out, or give a model.",
            )
        check_sources(model=self.model.model)
        return load_model(self.model, tokenizer, kv_tokens=self.cache.num_tokens)

    def _defaults_for(self, runner: ModelRunner) -> SpeculationDefaults:
        """As the profile recommends, where there is one and it holds for this model and this machine."""
        if self.recommended is None:
            return self.defaults
        path, profile, config = self.recommended
        found = Identity.of(runner, self.model.rounding)
        profile.check_model(path, found)
        misfit = profile.misfit(found)
        if misfit:
            logger.warning("%s: the profile is ignored, since it was made for other circumstances: %s", path, misfit)
            return self.defaults
        return replace(self.defaults, config=self.defaults.complete(config))


def model_name(model: Any) -> Any:
    """What to call a model: its path or hub id, or the class of one that is given loaded."""
    if isinstance(model, torch.nn.Module):
        return type(model).__name__
    source = default_model("target") if model is None else model
    return fspath(source) if isinstance(source, PathLike) else source


def draft_name(draft_model: Any) -> Any:
    """What settings call a draft model: its path or hub id, or words that can be neither for one that is given loaded.

    Raises:
        InvalidParameterError: It is loaded, and is no causal language model with all its weights in one place.
    """
    if not isinstance(draft_model, torch.nn.Module):
        return draft_model
    name = f"{type(draft_model).__name__} (given loaded)"
    check_given(draft_model, ModelConfig(model=name), "draft_model")
    return name


def checkpoint_params(loaded: LoadedModel) -> SamplingParams:
    """The parameters of requests that bring none: the checkpoint's own where it names some."""
    taken: dict[str, Any] = {}
    for name, value in loaded.generation_defaults.items():
        try:
            SamplingParams(**{name: value})
        except InputError as error:
            logger.warning("%s: its generation default is left out (%s)", loaded.name, error)
        else:
            taken[name] = value
    if taken:
        named = ", ".join(f"{name}={value}" for name, value in taken.items())
        logger.info("%s: without SamplingParams its own generation defaults are used: %s", loaded.name, named)
    return SamplingParams(**taken)
