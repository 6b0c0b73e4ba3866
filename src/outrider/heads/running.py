"""Runs heads beside their target, on our kernels where these compute their products."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.errors import HeadMismatchError
from outrider.heads.checkpoint import load_heads
from outrider.heads.config import HeadsConfig
from outrider.heads.networks import HeadNetwork
from outrider.heads.pairing import check_pairing, read_features
from outrider.kernels.library import kernel_library
from outrider.kernels.linear import packed_for, use_packed_linear
from outrider.model.runner import upcast_logits
from outrider.model.target import Target


class RunningHeads:
    """Heads in the target's dtype, on its device.

    Args:
        config: Their shape.
        network: Their layers; taken over.
        target: The target.
    """

    def __init__(self, config: HeadsConfig, network: HeadNetwork, target: Target) -> None:
        self.config = config
        self._target = target
        self._network = network.to(target.device, target.dtype)
        self._rows_dtype = use_kernels(self._network, target)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, num_heads: int) -> Tensor:
        """What the first heads hold likely.

        Args:
            hidden: [n, hidden_size] of the target, as it shows them.
            num_heads: How many heads.

        Returns:
            Logits [num_heads, n, vocab_size], float32 at least.
        """
        features = read_features(self.config, self._target, hidden)
        return upcast_logits(self._network(features.to(self._rows_dtype), self._target.head, num_heads))


def open_heads(folder: str, method: str, target: Target) -> RunningHeads:
    """Heads from a folder, for a method.

    Raises:
        InvalidParameterError: No such folder.
        ModelLoadError: It holds no heads that can be read.
        HeadMismatchError: They are of another kind, or were made for another target.
    """
    config, network, witness = load_heads(folder)
    if config.method != method:
        problem = f"its heads are for method={config.method!r}, and method={method!r} was asked for"
        raise HeadMismatchError(folder, problem, f"Use method={config.method!r}.", "method", config.method, method)
    check_pairing(folder, config, witness, target)
    return RunningHeads(config, network, target)


def use_kernels(network: nn.Module, target: Target) -> torch.dtype:
    """Let our kernels compute the products of a head where they can; returns the dtype in which rows are given."""
    library = kernel_library()
    if library is not None:
        use_packed_linear(network, library)
    if packed_for(network) is None:
        return target.dtype
    real = torch.float64 if target.dtype == torch.float64 else torch.float32  # what the kernels multiply and add in
    for module in network.modules():
        if isinstance(module, nn.RMSNorm):
            module.to(real)
    return real
