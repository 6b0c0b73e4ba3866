"""The configuration in a checkpoint of heads: shape, which hidden states are read, and which target they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from outrider.errors import ContradictionError, InvalidParameterError
from outrider.validation import Frozen

#: The form of checkpoints that this version writes and reads.
FORMAT = 1
#: Most tokens ahead that heads may guess.
MAX_HEADS = 32

Output = Literal["own", "target"]


class HeadTarget(Frozen):
    """The target that heads were made for.

    Attributes:
        name: Path or hub id, to show; another copy of the same model fits as well.
        model_type: The kind of model, as its configuration says.
        num_layers: Decoder layers.
        hidden_size: Width of its hidden states.
        vocab_size: Width of its logits.
    """

    name: str
    model_type: str
    num_layers: int = Field(ge=1, description="Use 1 or more.")
    hidden_size: int = Field(ge=1, description="Use 1 or more.")
    vocab_size: int = Field(ge=1, description="Use 1 or more.")


class HeadsConfig(Frozen):
    """What all kinds of heads say.

    Attributes:
        target: Whom they are for.
        layer: They read what the first so many layers of the target leave; 1 to the target's number of layers.
        normed: Whether the target's final norm is applied to that before they read it.
    """

    method: ClassVar[str]

    target: HeadTarget
    layer: int = Field(ge=1, description="Use 1 to the number of the target's layers.")
    normed: bool

    @property
    def num_heads(self) -> int:
        """Tokens ahead that they guess."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _has_that_layer(self) -> Self:
        if self.layer > self.target.num_layers:
            problem = f"the target has {self.target.num_layers} layers"
            raise InvalidParameterError("layer", self.layer, problem, f"Use 1 to {self.target.num_layers}.")
        return self

    def as_mapping(self) -> dict[str, Any]:
        """As one mapping of plain values; `read_config` reads it back."""
        return {"format": FORMAT, "method": self.method, **self.model_dump(mode="json")}


class RowHeadsConfig(HeadsConfig):
    """Heads that read rows which came back from the target's own pass."""

    @model_validator(mode="after")
    def _is_shown(self) -> Self:
        if self.layer == self.target.num_layers and not self.normed:
            problem = "what the last layer leaves is shown behind the final norm only"
            raise ContradictionError("normed", False, problem, "Use normed=True, or an earlier layer.")
        return self


class MedusaConfig(RowHeadsConfig):
    """Heads with residual blocks, independent of each other (Cai et al. 2024).

    Attributes:
        heads: How many; head i guesses the token i + 1 places behind the one that the target itself is about to write.
        blocks: Residual blocks in each head.
        width: Width of these blocks. Where it is not the target's, a projection of all heads comes first.
        output: "own" for an output layer in each head, "target" for the target's.
    """

    method: ClassVar[str] = "medusa"

    heads: int = Field(ge=1, le=MAX_HEADS, description=f"Use 1 to {MAX_HEADS}.")
    blocks: int = Field(1, ge=1, le=8, description="Use 1 to 8.")
    width: int = Field(ge=1, description="Use 1 or more; the target's hidden size is usual.")
    output: Output = Field("own", description="Use own or target.")

    @property
    def num_heads(self) -> int:
        return self.heads

    @model_validator(mode="after")
    def _fits_the_output(self) -> Self:
        if self.output == "target":
            _check_for_targets_output(self, self.width)
        return self


class BlockwiseConfig(RowHeadsConfig):
    """Heads behind one hidden layer, with the target's output layer (Stern et al. 2018).

    Attributes:
        heads: How many; head i guesses the token i + 1 places behind the one that the target itself is about to write.
        inner: Units of the hidden layer for each head.
    """

    method: ClassVar[str] = "blockwise"

    heads: int = Field(ge=1, le=MAX_HEADS, description=f"Use 1 to {MAX_HEADS}.")
    inner: int = Field(ge=1, description="Use 1 or more.")

    @property
    def num_heads(self) -> int:
        return self.heads

    @model_validator(mode="after")
    def _fits_the_output(self) -> Self:
        _check_for_targets_output(self, self.target.hidden_size)
        return self


class ExitConfig(HeadsConfig):
    """A head with which the target's first layers draft the next token.

    Where `normed` is false it has a norm of its own.

    Attributes:
        width: Width of its norm and of what its output layer reads. Where it is not the target's, a projection comes first.
        output: "own" for an output layer of its own, "target" for the target's.
        norm_eps: What its own norm adds to a variance.
    """

    method: ClassVar[str] = "exit"

    width: int = Field(ge=1, description="Use 1 or more; the target's hidden size is usual.")
    output: Output = Field("own", description="Use own or target.")
    norm_eps: float = Field(1e-5, gt=0.0, description="Use a small number above 0.")

    @property
    def num_heads(self) -> int:
        return 1

    @model_validator(mode="after")
    def _fits_the_output(self) -> Self:
        if self.output == "target" and self.width != self.target.hidden_size:
            raise _wrong_width(self.width, self.target.hidden_size)
        return self


_KINDS: dict[str, type[HeadsConfig]] = {kind.method: kind for kind in (MedusaConfig, BlockwiseConfig, ExitConfig)}


def read_config(mapping: Mapping[str, Any]) -> HeadsConfig:
    """The configuration from what `HeadsConfig.as_mapping` wrote.

    Raises:
        InputError: It is of another form, of an unknown kind, or has a setting that is missing or out of range.
    """
    values = dict(mapping)
    form, method, target = values.pop("format", None), values.pop("method", None), values.pop("target", None)
    if form != FORMAT:
        raise InvalidParameterError("format", form, "this version does not read it", f"Use heads of format {FORMAT}.")
    if method not in _KINDS:
        raise InvalidParameterError("method", method, "no kind of heads", f"Known: {', '.join(_KINDS)}.")
    if not isinstance(target, Mapping):
        raise InvalidParameterError("target", target, "it does not describe a target", "Write what HeadTarget holds.")
    return _KINDS[method](target=HeadTarget(**target), **values)


def _check_for_targets_output(config: HeadsConfig, width: int) -> None:
    """Raise where the target's output layer could not read what these heads leave."""
    if width != config.target.hidden_size:
        raise _wrong_width(width, config.target.hidden_size)
    if not config.normed:
        problem = "the target's output layer reads hidden states behind the final norm"
        raise ContradictionError("normed", False, problem, "Use normed=True, or output='own'.")


def _wrong_width(width: int, hidden_size: int) -> ContradictionError:
    problem = f"the target's output layer reads hidden states of width {hidden_size}"
    return ContradictionError("width", width, problem, f"Use {hidden_size}, or output='own'.")
