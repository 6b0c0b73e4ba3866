"""Where a model comes from: folders, files, hub ids and devices, each checked before anything is read."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path, PurePosixPath
from textwrap import shorten
from typing import Any

import torch

from outrider.config import ModelConfig, check_file
from outrider.errors import ContradictionError, InvalidParameterError, ModelLoadError, UnsupportedModelError
from outrider.loading.gguf.header import is_gguf

# --- Folders, files and hub ids that a user gives for a model.


def check_sources(**sources: str | None) -> None:
    """Refuse what is no checkpoint and cannot be a hub id either, before anything is loaded and without asking the hub.

    Args:
        sources: What was given for each field; None asks for nothing.
    """
    for name, source in sources.items():
        if source is None:
            continue
        check_file(name, source)
        if os.path.exists(source):
            check_is_checkpoint(name, source)
        elif not _may_be_hub_id(source):
            remedy = _OF_OLLAMA if _OLLAMA_NAME.fullmatch(source) else _NEEDED
            raise InvalidParameterError(name, source, "no such folder", remedy)


def check_is_there(field: str, path: str | None) -> None:
    """Refuse heads, or layers that predict several tokens, at a path where there is nothing. None asks for nothing."""
    if path is not None and not os.path.exists(path):
        remedy = "Give the folder or the file of what was trained for this target."
        raise InvalidParameterError(field, path, "no such folder", remedy)


def check_is_folder(field: str, source: str) -> None:
    """Refuse what is no folder, for commands that write a checkpoint in another form."""
    if os.path.isdir(source):
        return
    if os.path.isfile(source) and is_gguf(source):
        remedy = "Give the folder of the checkpoint that it was made from."
        raise InvalidParameterError(field, source, "it is a GGUF file, and folders alone are taken", remedy)
    raise InvalidParameterError(field, source, "no such folder", "Give the folder of a checkpoint.")


def _may_be_hub_id(source: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(source)
    except HFValidationError:
        return False
    return True


def source_options(config: ModelConfig) -> dict[str, Any]:
    """Returns where transformers finds a checkpoint, and what it may do with it."""
    options = hub_options(config.model, config.revision)
    return {"revision": config.revision, "trust_remote_code": config.trust_remote_code, **options}


# --- Asks the hub once whether a model is there, so that a wrong name or a missing network is told at once.


#: Seconds that the hub has for its answer.
_PATIENCE = 5.0


def hub_options(model: str, revision: str | None) -> dict[str, Any]:
    """Returns what transformers is told about the hub: where it does not answer, files come from its cache alone, without
    retries."""
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if os.path.isdir(model) or HF_HUB_OFFLINE:
        return {}
    try:
        HfApi().model_info(model, revision=revision, timeout=_PATIENCE)
    except GatedRepoError:
        return {}  # transformers tells how to get access
    except RevisionNotFoundError as error:
        raise ModelLoadError(
            model, f"the hub has no revision {revision!r} of it", "Use a branch, tag or commit."
        ) from error
    except RepositoryNotFoundError as error:
        remedy = "Check the spelling; for a private model, log in with `hf auth login`."
        raise ModelLoadError(model, "there is no folder of that name here, and no such model on the hub", remedy) from error
    except Exception:  # whatever the network does: a cached model needs none
        return {"local_files_only": True}
    return {}


def local_folder(model: str, options: dict[str, Any]) -> Path:
    """The folder of a checkpoint, or that of what the hub has of it, with its weights."""
    from huggingface_hub import snapshot_download

    if os.path.isdir(model):
        return Path(model)
    try:
        return Path(
            snapshot_download(
                model,
                revision=options.get("revision"),
                local_files_only=options.get("local_files_only", False),
                allow_patterns=["*.safetensors", "*.json"],
            )
        )
    except Exception as error:
        raise ModelLoadError(
            model, f"its weights cannot be had ({error})", "Check the network, or give a folder."
        ) from error


# --- Recognises folders and files that are no checkpoint of a causal decoder, and says what to do with each.


_ADAPTER, _CONFIG = "adapter_config.json", "config.json"
_NEEDED = "Give the folder that holds config.json and the weights, a GGUF file, or a hub id like owner/name."
#: Names of Ollama's and llama.cpp's kind, as llama3.2:1b and hf.co/owner/name:Q4_K_M.
_OLLAMA_NAME = re.compile(r"[\w.-]+(/[\w.-]+)*:[\w.-]+|(hf\.co|huggingface\.co)/.*")
_OF_OLLAMA = "Give the path of its GGUF file; `ollama show --modelfile NAME` prints it behind FROM."


def check_is_checkpoint(field: str, source: str) -> None:
    """Refuse a file, or a folder without a configuration, by what it is."""
    path = Path(source)
    if path.is_file():
        if is_gguf(source):
            return
        remedy = _way_on_from(path) or _NEEDED
        raise InvalidParameterError(field, source, "it is a file, and neither a folder nor a GGUF file", remedy)
    if (path / _CONFIG).exists() or not path.is_dir():
        return
    if (path / _ADAPTER).exists():
        raise _adapter(source)
    names = sorted(found.name for found in path.iterdir())
    if any(name.lower().endswith(".gguf") for name in names):
        raise _gguf(source, names)
    holds = f"it holds no {_CONFIG}, but {', '.join(names[:3])}" if names else "the folder is empty"
    cached = [found for found in sorted(path.glob("snapshots/*")) if (found / _CONFIG).exists()]
    remedy = f"Give {cached[-1]}, where the hub's cache keeps a revision of it." if cached else _NEEDED
    raise InvalidParameterError(field, source, holds, remedy)


def _way_on_from(file: Path) -> str | None:
    """What to give in place of a file: the folder of a checkpoint that it is a part of, or the file that a Modelfile of
    Ollama names; None where it is neither."""
    if (file.parent / _CONFIG).exists():
        return f"Give its folder, {file.parent}."
    with file.open("rb") as content:
        named = re.search(rb"^FROM[ \t]+([^\r\n]+)", content.read(1 << 16), re.MULTILINE | re.IGNORECASE)
    if named is None:
        return None
    return f"Give the file that is named behind FROM: {named[1].decode('utf-8', 'replace').strip()}."


def missing_head(model: str, hf_config: Any, missing: list[str]) -> UnsupportedModelError | None:
    """The error for a checkpoint that lacks nothing but the output layer, as encoders and base models do."""
    kinds = tuple(getattr(hf_config, "architectures", None) or ())
    if any(kind.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for kind in kinds):
        return None
    if not kinds or any(".layers." in name or ".layer." in name or ".h." in name for name in missing):
        return None
    problem = (
        f"it is a {kinds[0]} without an output layer over the vocabulary ({missing[0]} is missing), so it writes no text"
    )
    return UnsupportedModelError(model, problem, "Use a causal language model, like one that is called ...ForCausalLM.")


def wrong_shape(model: str, mismatched: list[tuple[str, Any, Any]]) -> ModelLoadError:
    """The error for weights whose shapes are not those of the configuration."""
    name, found, wanted = mismatched[0]
    problem = f"{name} has shape {list(found)}, and {_CONFIG} asks for {list(wanted)}"
    if len(mismatched) > 1:
        problem += f"; so it is with {len(mismatched) - 1} more"
    return ModelLoadError(model, problem, f"Put the {_CONFIG} beside the weights that belongs to them.")


def _gguf(source: str, names: list[str]) -> UnsupportedModelError:
    first = next(name for name in names if name.lower().endswith(".gguf"))
    return UnsupportedModelError(
        source, "it holds GGUF files, and no other checkpoint", f"Give one of them, as {source}/{first}."
    )


def _adapter(source: str) -> UnsupportedModelError:
    try:
        base = json.loads((Path(source) / _ADAPTER).read_text("utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    of = f" of {base}" if base else ""
    remedy = "Merge it with its model (merge_and_unload() of the peft package), and give the merged folder or module."
    return UnsupportedModelError(source, f"it is an adapter{of}, and no whole model", remedy)


# --- Checks of a checkpoint's folder before it is read: no devices, no pipes, no absurd sizes, no paths that leave it.


WHOLE = "model.safetensors"
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
#: What loading reads: configurations, vocabularies, templates, weights.
_READ = (".json", ".txt", ".jinja", ".model", ".safetensors", ".bin")
_WEIGHTS = (".safetensors", ".bin")
#: Files of one name are read whole. The index of a thousand billion parameters has ten million bytes, and the largest
#: tokenizers have fifty million.
_LARGEST_CONFIG, _LARGEST_TOKENIZER = 64_000_000, 512_000_000
_DOWNLOAD = "Download or save the checkpoint again."


def check_files(model: str) -> None:
    """Refuse a folder with a file that cannot be a part of a checkpoint. What is no folder is left alone."""
    folder = Path(model)
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.name.endswith(_READ):
            _check_file(model, path, path.name)
    index = next((folder / name for name in _INDICES if (folder / name).is_file()), None)
    if index is not None and not (folder / WHOLE).is_file():  # else transformers does not read it
        for name in indexed_files(model, index):
            _check_file(model, folder / name, f"{name}, which {index.name} names,")


def _check_file(model: str, path: Path, name: str) -> None:
    try:
        found = path.stat()
    except OSError:  # not there, or not ours to read: whoever needs it says so
        return
    if stat.S_ISDIR(found.st_mode):
        return
    if not stat.S_ISREG(found.st_mode):  # reading it may never end
        raise ModelLoadError(model, f"{name} is a device or a pipe, and no file", _DOWNLOAD)
    largest = _LARGEST_TOKENIZER if path.name.startswith(("tokenizer", "vocab", "merges")) else _LARGEST_CONFIG
    if found.st_size > largest and not path.name.endswith((*_WEIGHTS, ".model")):
        problem = f"{name} has {found.st_size:,} bytes, and {largest:,} are the most that such a file is read with"
        raise ModelLoadError(model, problem, _DOWNLOAD)


def indexed_files(model: str, index: Path) -> list[str]:
    """The files that an index names, each once and sorted."""
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelLoadError(model, f"{index.name} is no index of weights ({type(error).__name__})", _DOWNLOAD) from error
    for name in names:
        if not isinstance(name, str) or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            problem = f"{index.name} names {name!r} for weights, which is no file of this folder"
            raise ModelLoadError(model, problem, "Do not use this checkpoint unless you know who made it.")
    return sorted(names)


# --- Names of devices: which of them can be used here.


def usable_device(name: str | None) -> torch.device:
    """The device of that name; for None the CPU: a GPU is taken where the caller asks for it, since none was measured
    yet."""
    name = "cpu" if name is None else name
    try:
        device = torch.device(name)
        torch.empty(1, device=device).sum().item()  # a device without numbers, as "meta", is none
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = shorten(str(error).splitlines()[0], 160, placeholder=" ...")
        raise InvalidParameterError("device", name, f"it cannot be used here ({reason})", _device_remedy(name)) from error
    return device


def check_invariant(batch_invariant: bool, device: torch.device) -> None:
    """Raise ContradictionError where bits that do not depend on the batch are wanted of a GPU."""
    if batch_invariant and device.type == "cuda":
        raise ContradictionError(
            "batch_invariant",
            batch_invariant,
            f"on {device} PyTorch adds up a row, as norms do, in an order that depends on the number of rows",
            'Use device="cpu", or leave batch_invariant out.',
        )


def _device_remedy(name: str) -> str:
    """Returns what can be used here; and where CUDA is missing from PyTorch, that no driver would help."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        return f"Use cpu or {'cuda' if count == 1 else f'cuda:0 to cuda:{count - 1}'}."
    if name.startswith("cuda") and not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return "Use cpu, or install a PyTorch that is built for CUDA."
    return "Use cpu."
