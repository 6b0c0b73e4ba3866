"""Where data come from: the facts of the target that wrote them, and a witness of its hidden states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from outrider.errors import ContradictionError, InvalidParameterError
from outrider.files import write_tensors
from outrider.heads.checkpoint import Witness, witness_tokens
from outrider.heads.pairing import TOLERANCE
from outrider.model.loading.loaded_model import LoadedModel
from outrider.model.target import Target
from outrider.train.manifest import Manifest, TargetFacts

WITNESS = "witness.safetensors"
_REMEDY = "Use the target that wrote the data, or another folder."


def target_facts(loaded: LoadedModel) -> TargetFacts:
    """What data say of the target that writes them."""
    config = loaded.model.config.get_text_config(decoder=True)
    return TargetFacts(
        name=loaded.name,
        vocab_size=loaded.vocab_size,
        hidden_size=int(config.hidden_size),
        num_layers=int(config.num_hidden_layers),
    )


def target_witness(target: Target) -> Witness:
    """What the final norm leaves of a fixed text; for an engine that rests."""
    tokens = witness_tokens(target.vocab_size)
    out = target.run_apart(tokens.tolist(), aux_layers=(target.num_layers,))
    return Witness(tokens, out.aux_hidden_states[target.num_layers].float().cpu())


def keep_witness(folder: Path, manifest: Manifest, witness: Witness) -> None:
    """Write the witness of data that begin; see that data which are there were written by the same target.

    Raises:
        ContradictionError: Another target wrote them.
        InvalidParameterError: The witness in the folder cannot be read.
        StorageError: The folder takes no file.
    """
    if (folder / WITNESS).exists():
        check_witness(folder, manifest.target.name, lambda _: witness.features)
    elif not manifest.shards:
        write_tensors(folder / WITNESS, witness._asdict(), {"format": "outrider witness"})


def check_witness(folder: Path, name: str, states: Callable[[Tensor], Tensor]) -> None:
    """See that a target is the one that wrote the data, as far as the folder holds a witness of it.

    Args:
        folder: Of the data.
        name: Of the target, to show.
        states: What its final norm leaves [num_tokens, hidden_size] of tokens [num_tokens].

    Raises:
        ContradictionError: It is another one.
        InvalidParameterError: The witness cannot be read.
    """
    if not (folder / WITNESS).exists():
        return
    kept = _read(folder / WITNESS)
    features = states(kept.token_ids).double().cpu()
    if features.shape != kept.features.shape:
        problem = f"its hidden states have width {features.shape[-1]}, and those of the data {kept.features.shape[-1]}"
        raise ContradictionError("target", name, problem, _REMEDY)
    distance = float((features - kept.features).norm() / kept.features.double().norm())
    if not distance <= TOLERANCE:  # NaN is no match either
        problem = f"its hidden states differ from those of the target that wrote {folder} by {distance:.2f} of their length"
        raise ContradictionError("target", name, problem, _REMEDY)


def _read(file: Path) -> Witness:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(file)
        return Witness(found["token_ids"], found["features"])
    except (OSError, SafetensorError, KeyError) as error:
        remedy = "Make the data again in an empty folder."
        raise InvalidParameterError("data", str(file), f"it cannot be read ({error})", remedy) from error
