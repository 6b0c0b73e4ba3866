"""Texts that the target wrote, and the files that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from outrider.errors import InvalidParameterError
from outrider.files import write_tensors
from outrider.train.manifest import Manifest, Shard
from outrider.train.prompts import DIGEST_BYTES


@dataclass(frozen=True)
class Record:
    """One text.

    Attributes:
        digest: [DIGEST_BYTES] of its prompt.
        sample: Which text of this prompt it is.
        held_out: Whether it is never trained on.
        num_prompt_tokens: How many of its tokens are the prompt.
        token_ids: [num_tokens] prompt first.
        rows: What was kept of the target's passes, [num_tokens - 1, ...] by name: row i was computed at token i and speaks
            of token i + 1. The last token's row is never computed.
    """

    digest: bytes
    sample: int
    held_out: bool
    num_prompt_tokens: int
    token_ids: Tensor
    rows: dict[str, Tensor] = field(default_factory=dict)


def hidden_name(layer: int) -> str:
    """The name of the hidden states of a layer in a record's rows."""
    return f"hidden_states.{layer}"


#: Names of the target's most likely next tokens and of their logits in a record's rows.
TOP_TOKENS, TOP_LOGITS = "top_tokens", "top_logits"


def write_shard(folder: Path, name: str, records: Sequence[Record]) -> Shard:
    """Write records to a file that is there as a whole or not at all; returns what the manifest says of it.

    Raises:
        StorageError: It cannot be written.
    """
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
    """Every record that the manifest names, with the rows of these names.

    Raises:
        InvalidParameterError: A file is missing or damaged, or does not hold what the manifest says.
    """
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
