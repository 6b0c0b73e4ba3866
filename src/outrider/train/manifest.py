"""The manifest of a folder of training data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from outrider.errors import ContradictionError, InvalidParameterError
from outrider.files import write_text
from outrider.validation import Frozen

MANIFEST = "manifest.json"
#: Bytes of a token, of a likely token with its logit, and of what is said of a text, as files hold them.
_BYTES_OF_TOKEN, _BYTES_OF_TOP, _BYTES_OF_TEXT = 4, 8, 29
_MAKE_ONE = "Make it with outrider train data --target T --prompts P --out DIR."


class Kept(BaseModel):
    """An immutable record that is kept as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _as_layers(value: Any) -> Any:
    """Layer numbers in ascending order, each once."""
    is_list = isinstance(value, list | tuple) and all(type(each) is int for each in value)
    return tuple(sorted(set(value))) if is_list else value


class DataSettings(Frozen):
    """How the target writes the data.

    Attributes:
        max_tokens: Most tokens that it writes behind a prompt. With 0 it writes none, and the prompts are the data.
        prompt_tokens: Tokens of the prompts that texts are cut into.
        samples: Texts for each prompt.
        temperature, top_k, top_p: As in serving: a draft should learn what it will be compared with.
        seed: Of the texts.
        held_out: Share of the prompts that is never trained on. It is chosen by the prompt's digest.
        hidden_states: Layers whose hidden states are kept, by transformers' index: i is the input of layer i, the number of
            layers what the final norm leaves.
        target_top_k: How many of the target's most likely next tokens are kept with their logits; 0 keeps none.
    """

    max_tokens: int = Field(128, ge=0, description="Use 0 or more.")
    prompt_tokens: int = Field(64, ge=1, description="Use 1 or more.")
    samples: int = Field(1, ge=1, description="Use 1 or more.")
    temperature: float = Field(1.0, ge=0.0, description="Use 0 (greedy) or more.")
    top_k: int = Field(0, ge=0, description="Use 0 (all) or more.")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Use a number above 0, up to 1.")
    seed: int = Field(0, ge=0, lt=2**32, description="Use 0 to 2**32 - 1.")
    held_out: float = Field(0.05, gt=0.0, lt=1.0, description="Use a share between 0 and 1, such as 0.05.")
    hidden_states: Annotated[tuple[int, ...], BeforeValidator(_as_layers)] = Field(
        (), description="Use layer numbers from 0 to the number of layers."
    )
    target_top_k: int = Field(0, ge=0, description="Use 0 or more.")

    @property
    def keeps_rows(self) -> bool:
        """Whether anything is kept of the target's passes."""
        return bool(self.hidden_states or self.target_top_k)

    def most_bytes(self, num_prompt_tokens: int, target: TargetFacts, itemsize: int) -> int:
        """Bytes of a text that is as long as it may be, and of what is kept of the target's passes.

        Args:
            num_prompt_tokens: Tokens of its prompt.
            target: Who writes.
            itemsize: Bytes of a number of its hidden states.
        """
        num_tokens = num_prompt_tokens + self.max_tokens
        row = len(self.hidden_states) * target.hidden_size * itemsize + self.target_top_k * _BYTES_OF_TOP
        return _BYTES_OF_TEXT + num_tokens * _BYTES_OF_TOKEN + (num_tokens - 1) * row


class TargetFacts(Kept):
    """The model that wrote the data.

    Attributes:
        name: Folder or hub id.
        vocab_size: Width of its logits.
        hidden_size: Width of its hidden states.
        num_layers: Decoder layers.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int


class Shard(Kept):
    """A file of records.

    Attributes:
        file: Its name in the folder.
        num_records: Texts in it.
        num_tokens: Their tokens, prompts included.
        num_held_out: How many of the texts are held out.
    """

    file: str
    num_records: int
    num_tokens: int
    num_held_out: int


class Manifest(Kept):
    """The contents of a folder of data. What it does not name does not count, whatever files there are.

    Attributes:
        version: Of the format.
        target: Who wrote.
        settings: How.
        shards: The files, in the order in which they were written.
    """

    version: int = Field(1, ge=1, le=1, description="This release reads version 1.")
    target: TargetFacts
    settings: DataSettings
    shards: tuple[Shard, ...] = ()

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
    """The manifest of a folder.

    Raises:
        InvalidParameterError: There is none, or it cannot be read.
    """
    try:
        return Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except OSError:
        raise InvalidParameterError("data", str(folder), f"it holds no {MANIFEST}", _MAKE_ONE) from None
    except ValidationError as error:
        detail = error.errors()[0]
        place = ".".join(map(str, detail["loc"]))
        raise InvalidParameterError("data", str(folder), f"{MANIFEST}: {place}: {detail['msg']}", _MAKE_ONE) from None


def open_manifest(folder: Path, target: TargetFacts, settings: DataSettings) -> Manifest:
    """The manifest of data that is made, or goes on to be made, by this target with these settings.

    Raises:
        ContradictionError: The folder holds data that were made otherwise.
        InvalidParameterError: Its manifest cannot be read.
    """
    if not (folder / MANIFEST).exists():
        return Manifest(target=target, settings=settings)
    found = read_manifest(folder)
    for old, new in ((found.target, target), (found.settings, settings)):
        for name, value in new:
            if getattr(old, name) != value:
                problem = f"{folder} holds data that were made with {getattr(old, name)!r}"
                raise ContradictionError(name, value, problem, "Use the same, or another folder.")
    return found
