"""Builds an engine: loads the target and its draft models, sizes their memory, builds proposers and applies a profile."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike, fspath
from stat import S_ISREG
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, Unpack
from weakref import WeakSet

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider import __version__
from outrider.config import CacheConfig, ModelConfig, QuantizationName, SchedulerConfig, default_model
from outrider.engine.drafting.proposers import ProposerSet
from outrider.engine.engine import Engine
from outrider.errors import (
    ContradictionError,
    InputError,
    InvalidParameterError,
    ModelError,
    ProfileMismatchError,
    UnsupportedModelError,
)
from outrider.heads.formats.mtp import carries_mtp, read_mtp_config
from outrider.kernels.library import kernel_library
from outrider.loading.configuration import FILE_ROUNDING, has_rounded_weights, read_needs
from outrider.loading.fit import Needs, needs
from outrider.loading.gguf.header import is_gguf, may_be_narrowed, read_gguf
from outrider.loading.loaded_model import LoadedModel
from outrider.loading.loader import adopt_model, check_given, load_model
from outrider.loading.sources import check_sources
from outrider.model.factory import make_runner
from outrider.model.memory import Beside, device_name
from outrider.model.runner import ModelRunner
from outrider.model.target import Target
from outrider.options import Speculation
from outrider.params import SamplingParams
from outrider.prompts import PromptEncoder
from outrider.propose.compositions import parts_of
from outrider.propose.defaults import SpeculationDefaults, drafter_at
from outrider.propose.draft_model import DraftModel, draft_models
from outrider.propose.settings import SpeculationConfig

# --- Profiles: recommended settings of speculation for one model on one machine.
#
# A profile changes no text, only the speed: every setting writes the same distribution.


#: The form of profiles that this version writes and reads.
FORMAT = 1
_AGAIN = "Run outrider tune again."
#: What a configuration says that changes nothing of what a model computes.
_IDLE_FIELDS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")


class Identity(BaseModel):
    """Says what a profile holds for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str  # path or hub id, to show; another copy of the same model fits as well
    config: str  # a digest of its configuration
    dtype: str  # that of its weights
    quantization: str | None  # how they are rounded; None where they are not
    processor: str  # the name of the processor, or of the accelerator where the model lies on one
    kernels: str | None  # the instruction set of our kernels; None where stock operators compute
    threads: int  # threads that compute

    @classmethod
    def of(cls, runner: ModelRunner, config: ModelConfig) -> Identity:
        """Returns the identity of a target which is loaded."""
        loaded = runner.loaded
        described = json.loads(loaded.model.config.to_json_string(use_diff=True))
        kept = {name: value for name, value in described.items() if name not in _IDLE_FIELDS}
        return cls(
            model=loaded.name,
            config=hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:24],
            dtype=str(loaded.dtype).removeprefix("torch."),
            quantization=config.rounding(rounds_rows=loaded.rounds_rows),
            processor=device_name(loaded.device),
            kernels=runner.backend.instruction_set(loaded.model),
            threads=torch.get_num_threads(),
        )


class Profile(BaseModel):
    """Holds what a tuning recommends, and what it was made for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1  # the form of this file
    outrider: str = __version__  # the version that made it
    identity: Identity  # what it holds for
    speculation: dict[str, Any]  # the settings, as SpeculationConfig.of takes them
    concurrency: Annotated[int, Field(ge=1)]  # texts at a time for which they were chosen
    gain: Annotated[float, Field(gt=0.0, allow_inf_nan=False)]  # the expected speedup over plain decoding
    measured: bool  # whether the gain was measured and not predicted

    def check_model(self, path: str, found: Identity) -> None:
        """Raise ProfileMismatchError where the profile was made for another model: its settings say nothing of this one."""
        made = self.identity
        if made.config != found.config:
            problem = f"the profile {path} was made for {made.model!r}, a model of another configuration"
            remedy = "Leave the profile out, or run outrider tune for this model."
            raise ProfileMismatchError(found.model, problem, remedy, "config", made.config, found.config)

    def misfit(self, found: Identity) -> str:
        """Why the profile does not hold for the weights' type or for the machine; empty where it does."""
        fields = ("dtype", "quantization", "processor", "kernels", "threads")
        pairs = ((name, getattr(self.identity, name), getattr(found, name)) for name in fields)
        return ", ".join(f"{name} was {made!r} and is {here!r}" for name, made, here in pairs if made != here)


def read_profile(path: str | PathLike[str]) -> tuple[Profile, SpeculationConfig]:
    """A profile, and the settings that it recommends."""
    name = fspath(path) if isinstance(path, str | PathLike) else path
    if not isinstance(name, str):
        raise InvalidParameterError("profile", path, "it is no path", "Give a file that outrider tune wrote.")
    profile = _parsed(name, _content(name))
    try:
        config = SpeculationConfig.of(profile.speculation)
        for each in config.candidates:
            for part in parts_of(each):
                if part.method is not None:
                    part.method.check_source("model")
    except InputError as error:
        made = f"Outrider {profile.outrider} made it"
        raise InvalidParameterError("profile", name, f"its settings cannot be used ({error}); {made}", _AGAIN) from error
    return profile, config


def _content(name: str) -> dict[str, Any]:
    try:
        with open(name, encoding="utf-8", opener=_open_at_once) as file:
            if not S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError("it is no regular file, and might have no end")
            content = json.load(file)
    except OSError as error:
        problem = f"it cannot be read ({error.strerror or error})"
        raise InvalidParameterError("profile", name, problem, "Give a file that outrider tune wrote.") from None
    except (ValueError, RecursionError) as error:
        raise InvalidParameterError("profile", name, f"it is not JSON ({error})", _AGAIN) from None
    if not isinstance(content, dict):
        raise InvalidParameterError("profile", name, "it is JSON, but no profile", _AGAIN)
    return content


def _open_at_once(path: str, flags: int) -> int:
    """Open what may be a pipe, for which others would wait until somebody writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def _parsed(name: str, content: dict[str, Any]) -> Profile:
    form = content.get("format")
    if isinstance(form, int) and form > FORMAT:
        problem = f"Outrider {content.get('outrider')} wrote it in form {form}, and this version reads form {FORMAT}"
        raise InvalidParameterError("profile", name, problem, "Update Outrider, or run outrider tune with this version.")
    try:
        return Profile.model_validate(content)
    except ValidationError as error:
        detail = error.errors()[0]
        field = ".".join(map(str, detail["loc"]))
        raise InvalidParameterError("profile", name, f"it is no profile ({field}: {detail['msg']})", _AGAIN) from None


# --- Builds an engine: loads the model, sizes its memory, builds its proposers and applies a profile.


logger = logging.getLogger(__name__)
#: The method that drafts with layers of the target's own checkpoint.
_MTP = "mtp"


class BuiltEngine(NamedTuple):
    """An engine, and what is known of its model now that it is loaded."""

    engine: Engine  # it has no work yet
    prompts: PromptEncoder  # turns prompts and conversations into token ids
    default_params: SamplingParams  # the parameters of requests that bring none
    defaults: SpeculationDefaults  # who drafts where a call leaves it open, by the profile if it holds here


class RecommendedSettings(NamedTuple):
    """A profile as it was read."""

    path: str  # its file
    profile: Profile  # for which model and which machine it was made
    config: SpeculationConfig  # the settings that it recommends

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
    """Holds what an engine is to be built of, checked as far as it can be before a weight is read."""

    model: ModelConfig
    cache: CacheConfig
    scheduling: SchedulerConfig
    defaults: SpeculationDefaults  # who drafts where a call leaves it open
    recommended: RecommendedSettings | None  # a profile that may say so instead
    embedded: bool  # whether the model is the one that comes with the package

    def build(self, model: Any, tokenizer: Any | None, draft_model: Any | None, *, consume: bool) -> BuiltEngine:
        """Load everything, in the thread that will run the engine."""
        config = self.model
        loaded = self._load(model, tokenizer, consume=consume)
        usual = self.defaults.with_carried(_MTP) if num_prediction_layers(loaded) else self.defaults
        given = {draft_name(draft_model): draft_model} if isinstance(draft_model, torch.nn.Module) else {}
        drafts = DraftLoader(loaded, config, self.cache, self.scheduling, given)
        runner = make_runner(
            loaded,
            config.attention_backend,
            self.cache,
            self.scheduling,
            batch_invariant=config.batch_invariant,
            beside=self._beside(loaded, drafts, usual),
        )
        drafts.serve(runner)
        defaults = self._defaults_for(runner, usual)
        longest = loaded.max_model_len if loaded.encoder is None else loaded.encoder.max_source_len
        prompts = PromptEncoder(loaded.tokenizer, None if self.embedded else config.model, longest)
        default_params = checkpoint_params(loaded)
        proposers = ProposerSet(Target(runner), self.scheduling.max_num_batched_tokens, drafts, defaults.kept)
        engine = Engine(runner, self.scheduling, proposers)
        try:
            engine.load_method(defaults.config)  # what cannot be used is better known now than at the first prompt
        except ModelError as error:
            if defaults is not usual or usual is self.defaults:
                raise
            logger.warning("%s carries layers that predict several tokens, which are not used: %s", loaded.name, error)
            defaults = self.defaults
            engine.load_method(defaults.config)
        said = carried_layers(loaded, defaults.config)
        if said:
            logger.info("%s %s", loaded.name, said)
        return BuiltEngine(engine, prompts, default_params, defaults)

    def _beside(self, loaded: LoadedModel, drafts: DraftLoader, usual: SpeculationDefaults) -> Beside:
        """Returns what all proposers that are known already take beside the target: their layers, and draft models."""
        configs = [usual.config] if self.recommended is None else [usual.config, self.recommended.config]
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
        name = self.model.model
        _refuse_drafts(name)
        check_sources(model=name)
        return load_model(self.model, tokenizer, kv_tokens=self.cache.kv_cache_tokens)

    def _defaults_for(self, runner: ModelRunner, usual: SpeculationDefaults) -> SpeculationDefaults:
        """Returns what the profile recommends, where there is one and it holds for this model and this machine."""
        if self.recommended is None:
            return usual
        path, profile, config = self.recommended
        found = Identity.of(runner, self.model)
        profile.check_model(path, found)
        misfit = profile.misfit(found)
        if misfit:
            logger.warning("%s: the profile is ignored, since it was made for other circumstances: %s", path, misfit)
            return usual
        return replace(self.defaults, config=self.defaults.complete(config))


def _refuse_drafts(model: str) -> None:
    """Raise UnsupportedModelError for a head or an assistant, which is no broken checkpoint of a model."""
    drafter = drafter_at(model)
    if not isinstance(drafter, DraftModel):
        problem = f"it drafts for a target (method {drafter.name}), and writes no text alone"
        raise UnsupportedModelError(model, problem, "Give its target as the model, and this as draft_model.")


def num_prediction_layers(loaded: LoadedModel) -> int:
    """Counts the layers that predict several tokens in the files of a target, where they can be computed. The hub is not
    asked again."""
    if loaded.file is None and loaded.source is None:
        return 0
    try:
        folder = loaded.folder(local=True)
        config = loaded.model.config.get_text_config(decoder=True)
        return read_mtp_config(folder, config).num_layers if carries_mtp(folder, config) else 0
    except (InputError, ModelError) as error:
        logger.debug("%s: its layers that predict several tokens are not read: %s", loaded.name, error)
        return 0


def carried_layers(loaded: LoadedModel, speculation: SpeculationConfig) -> str:
    """Says that a target carries layers that predict several tokens, and whether these settings use them; empty where it
    carries none."""
    count = num_prediction_layers(loaded)
    parts = [part for each in speculation.candidates for part in parts_of(each)]
    used = any(part.name == _MTP and getattr(part.method, "model", None) is None for part in parts)
    layers = f"{count} prediction layer{'s' if count > 1 else ''}: {_MTP}"
    return f"carries {layers}, {'in use' if used else 'not in use'}" if count else ""


def model_name(model: Any) -> Any:
    """Returns what to call a model: its path or hub id, or the class of one that is given loaded."""
    if isinstance(model, torch.nn.Module):
        return type(model).__name__
    source = default_model("target") if model is None else model
    return fspath(source) if isinstance(source, PathLike) else source


def draft_name(draft_model: Any) -> Any:
    """Returns what settings call a draft model: its path or hub id, or words that can be neither for one that is given
    loaded."""
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


# --- Loading models that draft beside a target.


#: Bytes of weights from which on a draft model is rounded where nobody says how: fewer stay in caches.
_LEAST_ROUNDED = 64 * 2**20


def usual_draft_rounding(settings: ModelConfig) -> QuantizationName | None:
    """Returns how a draft model is rounded where nobody says: its passes read all weights, and take less time where these
    are smaller. None where it would gain little, or cannot be rounded."""
    if settings.device not in (None, "cpu") or kernel_library() is None:
        return None
    try:
        if is_gguf(settings.model):
            file = read_gguf(settings.model)
            return FILE_ROUNDING if may_be_narrowed(file) and file.nbytes >= _LEAST_ROUNDED else None
        found = read_needs(settings)
        if found is not None and found.weight_bytes < _LEAST_ROUNDED:
            return None
        return "int8" if settings.dtype in ("bfloat16", "float16") and not has_rounded_weights(settings) else None
    except (InputError, ModelError):  # loading says it better
        return None


class DraftSettings(TypedDict, total=False):
    """A draft model is loaded so, where these are given, and otherwise as the target or as all draft models."""

    dtype: str | None
    quantization: str | None
    revision: str | None
    trust_remote_code: bool


class DraftLoader:
    """Loads models that draft beside a target, each with KV memory of its own that holds what the target's holds.

    Args:
        scheduling: Sequences that run at a time, and rows of a pass.
        given: Models that the caller has loaded, by the name that settings have for them. They are copied whenever a
            proposer is built.
    """

    def __init__(
        self,
        target: LoadedModel,
        settings: ModelConfig,
        cache: CacheConfig,
        scheduling: SchedulerConfig,
        given: Mapping[str, Any] | None = None,
    ) -> None:
        self._given = given or {}
        self._target = target
        self._settings = settings
        self._cache = cache
        self._scheduling = scheduling
        self._runners = WeakSet[ModelRunner]()
        self._usual_roundings: dict[str, QuantizationName | None] = {}

    def __call__(self, model: str, **how: Unpack[DraftSettings]) -> ModelRunner:
        """Load a folder or hub id, or copy a model that was given. Where `dtype` is None it is the target's, and where
        `quantization` is None it is that of all draft models, or what is usual. Trust is given to each checkpoint alone."""
        if model not in self._given:
            check_sources(draft_model=model)
        settings = self._settings_of(model, how)
        if self._settings.activations == "none":
            settings = settings.replace(activations="none")
        elif self._target.rounds_rows and self._is_rounded(settings):
            settings = settings.replace(activations="int8")
        loaded = self._load(settings)
        cache = self._cache.replace(kv_cache_tokens=self._capacity)
        beside = Beside(keys=sum(runner.unmade_bytes for runner in self._runners))
        runner = make_runner(loaded, "auto", cache, self._scheduling, beside=beside)
        self._runners.add(runner)
        return runner

    def serve(self, target: ModelRunner) -> None:
        """From now on drafts can be loaded: the target has its memory, and what fits there fits that of a draft."""
        self._runners.add(target)
        self._capacity = target.blocks.num_blocks * target.blocks.block_size

    def needs(self, model: str, **how: Unpack[DraftSettings]) -> Needs | None:
        """Returns what a draft model will take of memory; None where that is not known before it is loaded."""
        settings = self._settings_of(model, how)
        given = self._given.get(model)
        if given is not None:
            return needs(settings, given.config, sum(w.numel() for w in given.parameters()) * self._target.dtype.itemsize)
        try:
            return read_needs(settings)
        except (InputError, ModelError):  # which loading will raise, with the place of the setting
            return None

    def _settings_of(self, model: str, how: DraftSettings) -> ModelConfig:
        """Makes the settings of a draft model. Its bits may differ from batch to batch: drafts are guesses."""
        target = self._target
        rounding: Any = how.get("quantization") or self._settings.draft_quantization
        dtype: Any = how.get("dtype") or str(target.dtype).removeprefix("torch.")
        settings = ModelConfig(
            model=model,
            dtype=dtype,
            device=str(target.device),
            quantization=None if rounding == "none" else rounding,
            revision=how.get("revision"),
            trust_remote_code=how.get("trust_remote_code", False),
        )
        if rounding is None and model not in self._given:
            if model not in self._usual_roundings:
                self._usual_roundings[model] = usual_draft_rounding(settings)
            return settings.replace(quantization=self._usual_roundings[model])
        return settings

    def _is_rounded(self, settings: ModelConfig) -> bool:
        """Tells whether the weights of a draft model are rounded, or were in its files."""
        if settings.model in self._given:
            return settings.quantization is not None
        return has_rounded_weights(settings)

    def _load(self, settings: ModelConfig) -> LoadedModel:
        given = self._given.get(settings.model)
        return load_model(settings) if given is None else adopt_model(given, settings)
