"""Texts that the target wrote, kept in folders: the files, their manifest, and where the texts come from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from torch import Tensor

from outrider.config import Frozen
from outrider.errors import ContradictionError, InvalidParameterError
from outrider.files import write_tensors, write_text
from outrider.heads.checkpoint import TOLERANCE, Witness, witness_tokens
from outrider.loading.loaded_model import LoadedModel
from outrider.model.target import Target

#: Bytes of a prompt's digest: two prompts of a million share one with a chance of 1e-27.
DIGEST_BYTES = 16


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt in the target's tokens."""

    where: str  # file and line, for errors
    token_ids: tuple[int, ...]  # its tokens
    digest: bytes  # [DIGEST_BYTES] of its tokens: equal prompts are one
    # [DIGEST_BYTES] of what decides whether it is held out: of itself, or of the conversation that it belongs to.
    group: bytes

    def held_out(self, share: float) -> bool:
        """Tells whether it belongs to the share that is never trained on. More prompts do not change it."""
        # The last bytes, since the first ones decide the order in which prompts are taken.
        return int.from_bytes(self.group[-8:], "big") < share * 2**64


def prompt_of(where: str, tokens: Sequence[int], group: Sequence[int]) -> EncodedPrompt:
    """A prompt of these tokens.

    Args:
        group: Numbers that it shares with the prompts that stand on its side of the split; its tokens where it is alone.
    """
    return EncodedPrompt(where, tuple(tokens), _digest(tokens), _digest(group))


def _digest(tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(np.asarray(tokens, dtype="<i8").tobytes()).digest()[:DIGEST_BYTES]


# --- Texts that the target wrote, and the files that hold them.


@dataclass(frozen=True)
class Record:
    """One text."""

    digest: bytes  # [DIGEST_BYTES] of its prompt
    sample: int  # which text of this prompt it is
    held_out: bool  # whether it is never trained on
    num_prompt_tokens: int  # how many of its tokens are the prompt
    token_ids: Tensor  # [num_tokens] prompt first
    # What was kept of the target's passes, [num_tokens - 1, ...] by name: row i was computed at token i and speaks of token
    # i + 1. The last token's row is never computed.
    rows: dict[str, Tensor] = field(default_factory=dict)


def hidden_name(layer: int) -> str:
    """The name of the hidden states of a layer in a record's rows."""
    return f"hidden_states.{layer}"


#: Names of the target's most likely next tokens and of their logits in a record's rows.
TOP_TOKENS, TOP_LOGITS = "top_tokens", "top_logits"


def write_shard(folder: Path, name: str, records: Sequence[Record]) -> Shard:
    """Write records to a file that is there as a whole or not at all; returns what the manifest says of it."""
    lengths = torch.tensor([len(record.token_ids) for record in records])
    tensors = {
        "token_ids": torch.cat([record.token_ids for record in records]).to(torch.int32),
        "num_tokens": lengths.to(torch.int32),
        "num_prompt_tokens": torch.tensor([record.num_prompt_tokens for record in records], dtype=torch.int32),
        "sample": torch.tensor([record.sample for record in records], dtype=torch.int32),
        "held_out": torch.tensor([record.held_out for record in records], dtype=torch.uint8),
        "digest": torch.tensor([list(record.digest) for record in records], dtype=torch.uint8),
    }
    tensors |= {key: torch.cat([record.rows[key] for record in records]) for key in records[0].rows}
    write_tensors(folder / name, tensors, {"format": "outrider training data"})
    held_out = sum(record.held_out for record in records)
    return Shard(file=name, num_records=len(records), num_tokens=int(lengths.sum()), num_held_out=held_out)


def read_records(folder: Path, manifest: Manifest, *, rows: Sequence[str] = ()) -> list[Record]:
    """Every record that the manifest names, with the rows of these names."""
    return [record for shard in manifest.shards for record in _read_shard(folder, shard, rows)]


def _read_shard(folder: Path, shard: Shard, rows: Sequence[str]) -> list[Record]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / shard.file, "pt") as file:
            found = {name: file.get_tensor(name) for name in (*_COLUMNS, *rows)}
    except (OSError, SafetensorError) as error:
        remedy = "Make the data again in an empty folder."
        raise InvalidParameterError("data", str(folder / shard.file), f"it cannot be read ({error})", remedy) from error
    lengths = found["num_tokens"].tolist()
    if len(lengths) != shard.num_records or sum(lengths) != shard.num_tokens:
        problem = f"it holds {len(lengths)} texts, and the manifest says {shard.num_records}"
        raise InvalidParameterError("data", str(folder / shard.file), problem, "Make the data again in an empty folder.")
    texts = found["token_ids"].long().split(lengths)
    parts = {name: found[name].split([length - 1 for length in lengths]) for name in rows}
    return [
        Record(
            bytes(found["digest"][i].tolist()),
            int(found["sample"][i]),
            bool(found["held_out"][i]),
            int(found["num_prompt_tokens"][i]),
            text,
            {name: part[i] for name, part in parts.items()},
        )
        for i, text in enumerate(texts)
    ]


_COLUMNS = ("token_ids", "num_tokens", "num_prompt_tokens", "sample", "held_out", "digest")
assert DIGEST_BYTES == 16, "the format holds digests of this size"


# --- The manifest of a folder of training data.


MANIFEST = "manifest.json"
#: Bytes of a token, of a likely token with its logit, and of what is said of a text, as files hold them.
_BYTES_OF_TOKEN, _BYTES_OF_TOP, _BYTES_OF_TEXT = 4, 8, 29
_MAKE_ONE = "Make it with outrider train data --target T --prompts P --out DIR."


class JsonRecord(BaseModel):
    """An immutable record that is kept as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _as_layers(value: Any) -> Any:
    """Layer numbers in ascending order, each once."""
    is_list = isinstance(value, list | tuple) and all(type(each) is int for each in value)
    return tuple(sorted(set(value))) if is_list else value


class DataSettings(Frozen):
    """Says how the target writes the data."""

    #: Most tokens that it writes behind a prompt. With 0 it writes none, and the prompts are the data.
    max_tokens: int = Field(128, ge=0, description="Use 0 or more.")
    prompt_tokens: int = Field(64, ge=1, description="Use 1 or more.")  # tokens of the prompts that texts are cut into
    samples: int = Field(1, ge=1, description="Use 1 or more.")  # texts for each prompt
    #: As in serving: a draft should learn what it will be compared with.
    temperature: float = Field(1.0, ge=0.0, description="Use 0 (greedy) or more.")
    top_k: int = Field(0, ge=0, description="Use 0 (all) or more.")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Use a number above 0, up to 1.")
    seed: int = Field(0, ge=0, lt=2**32, description="Use 0 to 2**32 - 1.")  # of the texts
    #: Share of the prompts that is never trained on. It is chosen by the prompt's digest.
    held_out: float = Field(0.05, gt=0.0, lt=1.0, description="Use a share between 0 and 1, such as 0.05.")
    #: Layers whose hidden states are kept, by transformers' index: i is the input of layer i, the number of layers what
    #: the final norm leaves.
    hidden_states: Annotated[tuple[int, ...], BeforeValidator(_as_layers)] = Field(
        (), description="Use layer numbers from 0 to the number of layers."
    )
    #: How many of the target's most likely next tokens are kept with their logits; 0 keeps none.
    target_top_k: int = Field(0, ge=0, description="Use 0 or more.")

    @property
    def keeps_rows(self) -> bool:
        """Tells whether anything is kept of the target's passes."""
        return bool(self.hidden_states or self.target_top_k)

    def most_bytes(self, num_prompt_tokens: int, target: TargetFacts, itemsize: int) -> int:
        """Bytes of a text that is as long as it may be, and of what is kept of the target's passes."""
        num_tokens = num_prompt_tokens + self.max_tokens
        row = len(self.hidden_states) * target.hidden_size * itemsize + self.target_top_k * _BYTES_OF_TOP
        return _BYTES_OF_TEXT + num_tokens * _BYTES_OF_TOKEN + (num_tokens - 1) * row


class TargetFacts(JsonRecord):
    """The model that wrote the data."""

    name: str  # folder or hub id
    vocab_size: int  # width of its logits
    hidden_size: int  # width of its hidden states
    num_layers: int  # decoder layers


class Shard(JsonRecord):
    """A file of records."""

    file: str  # its name in the folder
    num_records: int  # texts in it
    num_tokens: int  # their tokens, prompts included
    num_held_out: int  # how many of the texts are held out


class Manifest(JsonRecord):
    """The contents of a folder of data. What it does not name does not count, whatever files there are."""

    version: int = Field(1, ge=1, le=1, description="This release reads version 1.")  # of the format
    target: TargetFacts  # who wrote
    settings: DataSettings  # how
    shards: tuple[Shard, ...] = ()  # the files, in the order in which they were written

    @property
    def num_records(self) -> int:
        return sum(shard.num_records for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_held_out(self) -> int:
        return sum(shard.num_held_out for shard in self.shards)

    def with_shard(self, shard: Shard) -> Manifest:
        """The same, and one more file."""
        return self.model_copy(update={"shards": (*self.shards, shard)})

    def save(self, folder: Path) -> None:
        """Write it to the folder. Raises StorageError."""
        write_text(folder / MANIFEST, self.model_dump_json(indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder."""
    try:
        return Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except OSError:
        raise InvalidParameterError("data", str(folder), f"it holds no {MANIFEST}", _MAKE_ONE) from None
    except ValidationError as error:
        detail = error.errors()[0]
        place = ".".join(map(str, detail["loc"]))
        raise InvalidParameterError("data", str(folder), f"{MANIFEST}: {place}: {detail['msg']}", _MAKE_ONE) from None


def open_manifest(folder: Path, target: TargetFacts, settings: DataSettings) -> Manifest:
    """The manifest of data that is made, or goes on to be made, by this target with these settings."""
    if not (folder / MANIFEST).exists():
        return Manifest(target=target, settings=settings)
    found = read_manifest(folder)
    for old, new in ((found.target, target), (found.settings, settings)):
        for name, value in new:
            if getattr(old, name) != value:
                problem = f"{folder} holds data that were made with {getattr(old, name)!r}"
                raise ContradictionError(name, value, problem, "Use the same, or another folder.")
    return found


# --- Where data come from: the facts of the target that wrote them, and a witness of its hidden states.


WITNESS = "witness.safetensors"
_REMEDY = "Use the target that wrote the data, or another folder."


def target_facts(loaded: LoadedModel) -> TargetFacts:
    """Returns what data say of the target that writes them."""
    config = loaded.model.config.get_text_config(decoder=True)
    return TargetFacts(
        name=loaded.name,
        vocab_size=loaded.vocab_size,
        hidden_size=int(config.hidden_size),
        num_layers=int(config.num_hidden_layers),
    )


def target_witness(target: Target) -> Witness:
    """Returns what the final norm leaves of a fixed text; for an engine that rests."""
    tokens = witness_tokens(target.vocab_size)
    out = target.run_apart(tokens.tolist(), aux_layers=(target.num_layers,))
    return Witness(tokens, out.aux_hidden_states[target.num_layers].float().cpu())


def keep_witness(folder: Path, manifest: Manifest, witness: Witness) -> None:
    """Write the witness of data that begin; see that data which are there were written by the same target."""
    if (folder / WITNESS).exists():
        check_witness(folder, manifest.target.name, lambda _: witness.features)
    elif not manifest.shards:
        write_tensors(folder / WITNESS, witness._asdict(), {"format": "outrider witness"})


def check_witness(folder: Path, name: str, states: Callable[[Tensor], Tensor]) -> None:
    """See that a target is the one that wrote the data, as far as the folder holds a witness of it.

    Args:
        states: What its final norm leaves [num_tokens, hidden_size] of tokens [num_tokens].
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
