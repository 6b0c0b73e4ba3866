"""Loading models that draft beside a target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

from outrider.config import CacheConfig, ModelConfig, SchedulerConfig
from outrider.errors import InputError, ModelError
from outrider.model.factory import make_runner
from outrider.model.loading.configuration import has_rounded_weights, read_needs
from outrider.model.loading.fit import Needs, needs
from outrider.model.loading.loaded_model import LoadedModel
from outrider.model.loading.loader import adopt_model, load_model
from outrider.model.loading.sources import check_sources
from outrider.model.memory import Beside
from outrider.model.runner import ModelRunner


class DraftLoader:
    """Loads models that draft beside a target, each with KV memory of its own that holds what the target's holds.

    Args:
        target: The target.
        settings: How the target was loaded.
        cache: How its memory is cut.
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

    def __call__(
        self,
        model: str,
        *,
        dtype: str | None = None,
        quantization: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> ModelRunner:
        """Load a folder or hub id, or copy a model that was given. Where `dtype` is None it is the target's, and where
        `quantization` is None it is that of all draft models. Trust is given to each checkpoint alone.

        Raises:
            InvalidParameterError: No such folder.
            ModelError: It cannot be used, or there is no memory for it.
        """
        if model not in self._given:
            check_sources(draft_model=model)
        settings = self._settings_of(model, dtype, quantization, revision, trust_remote_code=trust_remote_code)
        if self._settings.activations is not None and self._is_rounded(settings):
            settings = settings.replace(activations=self._settings.activations)
        loaded = self._load(settings)
        cache = self._cache.replace(num_tokens=self._capacity)
        beside = Beside(keys=sum(runner.unmade_bytes for runner in self._runners))
        runner = make_runner(loaded, "auto", cache, self._scheduling, beside=beside)
        self._runners.add(runner)
        return runner

    def serve(self, target: ModelRunner) -> None:
        """From now on drafts can be loaded: the target has its memory, and what fits there fits that of a draft."""
        self._runners.add(target)
        self._capacity = target.blocks.num_blocks * target.blocks.block_size

    def needs(
        self,
        model: str,
        *,
        dtype: str | None = None,
        quantization: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> Needs | None:
        """What a draft model will take of memory; None where that is not known before it is loaded."""
        settings = self._settings_of(model, dtype, quantization, revision, trust_remote_code=trust_remote_code)
        given = self._given.get(model)
        if given is not None:
            return needs(settings, given.config, sum(w.numel() for w in given.parameters()) * self._target.dtype.itemsize)
        try:
            return read_needs(settings)
        except (InputError, ModelError):  # which loading will raise, with the place of the setting
            return None

    def _settings_of(
        self, model: str, dtype: str | None, quantization: str | None, revision: str | None, *, trust_remote_code: bool
    ) -> ModelConfig:
        target = self._target
        rounding = quantization or self._settings.draft_quantization
        return self._settings.replace(
            model=model,
            dtype=dtype or str(target.dtype).removeprefix("torch."),
            device=str(target.device),
            revision=revision,
            trust_remote_code=trust_remote_code,
            attention_backend="auto",
            max_model_len=None,
            quantization=rounding,
            activations=None,
            batch_invariant=False,  # drafts may differ in their bits: they are guesses
        )

    def _is_rounded(self, settings: ModelConfig) -> bool:
        """Whether the weights of a draft model are rounded, or were in its files."""
        if settings.model in self._given:
            return settings.quantization is not None
        return has_rounded_weights(settings)

    def _load(self, settings: ModelConfig) -> LoadedModel:
        given = self._given.get(settings.model)
        return load_model(settings) if given is None else adopt_model(given, settings)
