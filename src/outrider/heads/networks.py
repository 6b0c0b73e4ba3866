"""Heads on the target's last hidden states: their layers, and the configuration in their checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from outrider.config import Frozen
from outrider.errors import ContradictionError, InvalidParameterError

# --- The configuration in a checkpoint of heads: shape, which hidden states are read, and which target they belong to.


#: The form of checkpoints that this version writes and reads.
FORMAT = 1
#: Most tokens ahead that heads may guess.
MAX_HEADS = 32

Output = Literal["own", "target"]


class HeadTarget(Frozen):
    """The target that heads were made for."""

    name: str  # path or hub id, to show; another copy of the same model fits as well
    model_type: str  # the kind of model, as its configuration says
    num_layers: int = Field(ge=1, description="Use 1 or more.")  # decoder layers
    hidden_size: int = Field(ge=1, description="Use 1 or more.")  # width of its hidden states
    vocab_size: int = Field(ge=1, description="Use 1 or more.")  # width of its logits


class HeadsConfig(Frozen):
    """The settings that all kinds of heads have."""

    method: ClassVar[str]

    target: HeadTarget  # whom they are for
    #: They read what the first so many layers of the target leave; 1 to the target's number of layers.
    layer: int = Field(ge=1, description="Use 1 to the number of the target's layers.")
    normed: bool  # whether the target's final norm is applied to that before they read it

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
        """Returns the configuration as one mapping of plain values; `read_config` reads it back."""
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
    """Heads with residual blocks, independent of each other (Cai et al. 2024)."""

    method: ClassVar[str] = "medusa"

    #: How many; head i guesses the token i + 1 places behind the one that the target itself is about to write.
    heads: int = Field(ge=1, le=MAX_HEADS, description=f"Use 1 to {MAX_HEADS}.")
    blocks: int = Field(1, ge=1, le=8, description="Use 1 to 8.")  # residual blocks in each head
    #: Width of these blocks. Where it is not the target's, a projection of all heads comes first.
    width: int = Field(ge=1, description="Use 1 or more; the target's hidden size is usual.")
    #: "own" for an output layer in each head, "target" for the target's.
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
    """Heads behind one hidden layer, with the target's output layer (Stern et al. 2018)."""

    method: ClassVar[str] = "blockwise"

    #: How many; head i guesses the token i + 1 places behind the one that the target itself is about to write.
    heads: int = Field(ge=1, le=MAX_HEADS, description=f"Use 1 to {MAX_HEADS}.")
    inner: int = Field(ge=1, description="Use 1 or more.")  # units of the hidden layer for each head

    @property
    def num_heads(self) -> int:
        return self.heads

    @model_validator(mode="after")
    def _fits_the_output(self) -> Self:
        _check_for_targets_output(self, self.target.hidden_size)
        return self


class ExitConfig(HeadsConfig):
    """A head with which the target's first layers draft the next token.

    Where `normed` is false it has a norm of its own."""

    method: ClassVar[str] = "exit"

    #: Width of its norm and of what its output layer reads. Where it is not the target's, a projection comes first.
    width: int = Field(ge=1, description="Use 1 or more; the target's hidden size is usual.")
    #: "own" for an output layer of its own, "target" for the target's.
    output: Output = Field("own", description="Use own or target.")
    norm_eps: float = Field(1e-5, gt=0.0, description="Use a small number above 0.")  # what its own norm adds to a variance

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
    """The configuration from what `HeadsConfig.as_mapping` wrote."""
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


# --- The layers of heads: from hidden states of the target to logits of tokens further ahead.


#: The target's output layer: logits [n, vocab_size] of hidden states [n, hidden_size] behind the final norm.
TargetHead = Callable[[Tensor], Tensor]


class HeadNetwork(nn.Module):
    """The layers of heads; a subclass for each kind."""

    config: HeadsConfig  # their shape

    def forward(self, features: Tensor, target_head: TargetHead, num_heads: int | None = None) -> Tensor:
        """Computes what the first heads hold likely.

        Args:
            features: [n, hidden_size] of the target, as the configuration says they are read.
            num_heads: How many heads; None for all.

        Returns:
            Logits [num_heads, n, vocab_size].
        """
        raise NotImplementedError

    def begin(self, output: Tensor | None = None) -> None:
        """Take the weights that training begins with, so that each head begins by saying what the output layer would.

        Args:
            output: [vocab_size, width] the weight of the target's output layer, which own output layers begin as; None
                leaves these random.
        """
        raise NotImplementedError


class MedusaNetwork(HeadNetwork):
    """Residual blocks x + silu(W x + b) and an output layer in each head (Cai et al. 2024)."""

    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.reduce = _reduction(config.target.hidden_size, width)
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width) for _ in range(config.blocks)) for _ in range(config.heads)
        )
        self.outputs = nn.ModuleList(_outputs(config.output, width, config.target.vocab_size, config.heads))

    def forward(self, features: Tensor, target_head: TargetHead, num_heads: int | None = None) -> Tensor:
        count = self.config.heads if num_heads is None else num_heads
        read = self.reduce(features)
        states = [self._state(read, head) for head in range(count)]
        if self.outputs:
            return torch.stack([self.outputs[head](state) for head, state in enumerate(states)])
        return _through(target_head, torch.stack(states))

    def begin(self, output: Tensor | None = None) -> None:
        for block in (layer for head in self.blocks for layer in head):  # type: ignore[attr-defined]
            nn.init.zeros_(block.weight)  # the block adds nothing yet
            nn.init.zeros_(block.bias)
        _begin_outputs(self.outputs, output)

    def _state(self, read: Tensor, head: int) -> Tensor:
        for block in self.blocks[head]:  # type: ignore[attr-defined]
            read = read + nn.functional.silu(block(read))
        return read


class BlockwiseNetwork(HeadNetwork):
    """One hidden layer for all heads, and what it adds to the target's hidden state for each (Stern et al. 2018)."""

    config: BlockwiseConfig

    def __init__(self, config: BlockwiseConfig) -> None:
        super().__init__()
        self.config = config
        hidden, units = config.target.hidden_size, config.heads * config.inner
        self.up = nn.Linear(hidden, units)
        self.downs = nn.ModuleList(nn.Linear(units, hidden) for _ in range(config.heads))

    def forward(self, features: Tensor, target_head: TargetHead, num_heads: int | None = None) -> Tensor:
        inner = torch.relu(self.up(features))
        return _through(target_head, torch.stack([features + down(inner) for down in self.downs[:num_heads]]))

    def begin(self, output: Tensor | None = None) -> None:
        for down in self.downs:
            nn.init.zeros_(down.weight)  # type: ignore[arg-type]
            nn.init.zeros_(down.bias)  # type: ignore[arg-type]


class ExitNetwork(HeadNetwork):
    """A norm, where the target's is not applied, and an output layer."""

    config: ExitConfig

    def __init__(self, config: ExitConfig) -> None:
        super().__init__()
        self.config = config
        self.reduce = _reduction(config.target.hidden_size, config.width)
        self.norm = nn.Identity() if config.normed else nn.RMSNorm(config.width, config.norm_eps)
        self.outputs = nn.ModuleList(_outputs(config.output, config.width, config.target.vocab_size, 1))

    def forward(self, features: Tensor, target_head: TargetHead, num_heads: int | None = None) -> Tensor:
        state = self.norm(self.reduce(features))
        return (self.outputs[0](state) if self.outputs else target_head(state))[None]

    def begin(self, output: Tensor | None = None) -> None:
        _begin_outputs(self.outputs, output)


def build_network(config: HeadsConfig) -> HeadNetwork:
    """The layers that a configuration describes, with random weights as PyTorch begins them."""
    if isinstance(config, MedusaConfig):
        return MedusaNetwork(config)
    if isinstance(config, BlockwiseConfig):
        return BlockwiseNetwork(config)
    assert isinstance(config, ExitConfig), type(config)
    return ExitNetwork(config)


@torch.no_grad()
def randomise(network: HeadNetwork, seed: int, scale: float = 0.3) -> None:
    """Give every weight a random value, as tests need it: each head then says something of its own.

    Args:
        network: Changed in place.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def _reduction(hidden_size: int, width: int) -> nn.Module:
    return nn.Identity() if width == hidden_size else nn.Linear(hidden_size, width, bias=False)


def _outputs(output: str, width: int, vocab_size: int, count: int) -> list[nn.Linear]:
    return [nn.Linear(width, vocab_size, bias=False) for _ in range(count if output == "own" else 0)]


@torch.no_grad()
def _begin_outputs(outputs: nn.ModuleList, weight: Tensor | None) -> None:
    for layer in outputs if weight is not None else ():
        layer.weight.copy_(weight)  # type: ignore[operator, arg-type]


def _through(target_head: TargetHead, states: Tensor) -> Tensor:
    """Logits [num_heads, n, vocab_size] of states [num_heads, n, hidden_size], in one call."""
    count, n, width = states.shape
    return target_head(states.reshape(count * n, width)).reshape(count, n, -1)
