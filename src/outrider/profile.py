"""Profiles: recommended settings of speculation for one model on one machine.

A profile changes no text, only the speed: every setting writes the same distribution.
"""

from __future__ import annotations

import hashlib
import json
from os import PathLike, fspath
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider import __version__
from outrider.errors import InputError, InvalidParameterError, ProfileMismatchError
from outrider.model.loading.sources import check_sources
from outrider.model.processor import device_name
from outrider.model.runner import ModelRunner
from outrider.propose.compositions import parts_of
from outrider.propose.methods.draft_model import DraftModel
from outrider.propose.speculation import SpeculationConfig

#: The form of profiles that this version writes and reads.
FORMAT = 1
_AGAIN = "Run outrider tune again."
#: What a configuration says that changes nothing of what a model computes.
_IDLE_FIELDS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")


class Identity(BaseModel):
    """What a profile holds for.

    Attributes:
        model: Path or hub id, to show; another copy of the same model fits as well.
        config: A digest of its configuration.
        dtype: Of its weights.
        quantization: How they are rounded; None where they are not.
        processor: The name of the processor, or of the accelerator where the model lies on one.
        kernels: The instruction set of our kernels; None where stock operators compute.
        threads: Threads that compute.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    config: str
    dtype: str
    quantization: str | None
    processor: str
    kernels: str | None
    threads: int

    @classmethod
    def of(cls, runner: ModelRunner, quantization: str | None) -> Identity:
        """That of a target which is loaded.

        Args:
            runner: Of the target.
            quantization: How its weights were rounded at load.
        """
        loaded = runner.loaded
        config = json.loads(loaded.model.config.to_json_string(use_diff=True))
        kept = {name: value for name, value in config.items() if name not in _IDLE_FIELDS}
        return cls(
            model=loaded.name,
            config=hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:24],
            dtype=str(loaded.dtype).removeprefix("torch."),
            quantization=quantization,
            processor=device_name(loaded.device),
            kernels=runner.backend.instruction_set(loaded.model),
            threads=torch.get_num_threads(),
        )


class Profile(BaseModel):
    """What a tuning recommends, and what it was made for.

    Attributes:
        format: The form of this file.
        outrider: The version that made it.
        identity: What it holds for.
        speculation: The settings, as SpeculationConfig.of takes them.
        concurrency: Texts at a time for which they were chosen.
        gain: The expected speedup over plain decoding.
        measured: Whether the gain was measured and not predicted.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    outrider: str = __version__
    identity: Identity
    speculation: dict[str, Any]
    concurrency: Annotated[int, Field(ge=1)]
    gain: Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
    measured: bool

    def check_model(self, path: str, found: Identity) -> None:
        """Raise ProfileMismatchError where the profile was made for another model: its settings say nothing of this one.

        Args:
            path: Of the profile, to name.
            found: The model that is loaded.
        """
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
    """A profile, and the settings that it recommends.

    Raises:
        InvalidParameterError: The file cannot be read, is no profile or of a newer form, or names what is not there.
    """
    name = fspath(path) if isinstance(path, str | PathLike) else path
    if not isinstance(name, str):
        raise InvalidParameterError("profile", path, "it is no path", "Give a file that outrider tune wrote.")
    profile = _parsed(name, _content(name))
    try:
        config = SpeculationConfig.of(profile.speculation)
        for each in config.candidates:
            for part in parts_of(each):
                if isinstance(part.method, DraftModel):
                    check_sources(model=part.method.model)
    except InputError as error:
        made = f"Outrider {profile.outrider} made it"
        raise InvalidParameterError("profile", name, f"its settings cannot be used ({error}); {made}", _AGAIN) from error
    return profile, config


def _content(name: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(name).read_text("utf-8"))
    except OSError as error:
        problem = f"it cannot be read ({error.strerror or error})"
        raise InvalidParameterError("profile", name, problem, "Give a file that outrider tune wrote.") from None
    except (ValueError, RecursionError) as error:
        raise InvalidParameterError("profile", name, f"it is not JSON ({error})", _AGAIN) from None
    if not isinstance(content, dict):
        raise InvalidParameterError("profile", name, "it is JSON, but no profile", _AGAIN)
    return content


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
