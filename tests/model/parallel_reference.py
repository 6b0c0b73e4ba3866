"""P-EAGLE in plain PyTorch, read from the published files by their own names, with no code of the package."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.model.eagle_reference import EagleReference


class ParallelReference(EagleReference):
    """A head of P-EAGLE and the stock model that it belongs to; every draft is computed from its whole text."""

    @torch.no_grad()
    def logits(self, text: tuple[int, ...], path: tuple[int, ...]) -> Tensor:
        """Logits [vocab_size] of the token behind a text that the target has computed but for its last token, and a path
        that was drafted behind it, of which only the length counts."""
        return super().logits(text, (self.flags["mask_token_id"],) * len(path))

    def _left(self, text: tuple[int, ...], path: tuple[int, ...]) -> Tensor:
        if (text, path) not in self._known:
            self.prefix = "layers.0."
            left = self._run(torch.tensor([*text[1:], *path]), self._features(text, path))
            for number in range(1, self.layer["num_hidden_layers"]):
                self.prefix = f"layers.{number}."
                left = self._finished(left + self._attend(self._norm(left, f"{self.prefix}input_layernorm.weight")))
            self._known[text, path] = left
        return self._known[text, path]

    def _features(self, text: tuple[int, ...], path: tuple[int, ...]) -> Tensor:
        if not path:
            return super()._features(text, path)
        masks = list(self.weights["mask_hidden"][0].chunk(len(self.layers), -1))
        return torch.cat([super()._features(text, ()), self._fuse(masks).expand(len(path), -1)])
