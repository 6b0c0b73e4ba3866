"""The layers of heads: from hidden states of the target to logits of tokens further ahead."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from outrider.heads.config import BlockwiseConfig, ExitConfig, HeadsConfig, MedusaConfig

#: The target's output layer: logits [n, vocab_size] of hidden states [n, hidden_size] behind the final norm.
TargetHead = Callable[[Tensor], Tensor]


class HeadNetwork(nn.Module):
    """The layers of heads; a subclass for each kind.

    Attributes:
        config: Their shape.
    """

    config: HeadsConfig

    def forward(self, features: Tensor, target_head: TargetHead, num_heads: int | None = None) -> Tensor:
        """What the first heads hold likely.

        Args:
            features: [n, hidden_size] of the target, as the configuration says they are read.
            target_head: The target's output layer, for heads without one of their own.
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
        seed: Of the values.
        scale: Their standard deviation.
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
