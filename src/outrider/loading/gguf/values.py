"""The values of a GGUF file that describe its model, each checked when it is read."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.errors import ModelLoadError, UnsupportedModelError
from outrider.loading.file_limits import check_file_limit
from outrider.loading.gguf.header import AGAIN, ORIGINAL, GgufFile


class Values:
    """The values of a file that describe its model."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = self._text("general.architecture")

    def _text(self, key: str) -> str:
        found = self.file.metadata.get(key)
        if not isinstance(found, str):
            raise ModelLoadError(self.file.path, f"its {key} is {found!r}, and no text", AGAIN)
        return found

    @property
    def num_layers(self) -> int:
        """The layers of the model, without those behind them that predict several tokens."""
        layers, behind = self.count("block_count"), self.get("nextn_predict_layers") or 0
        if not isinstance(behind, int) or not 0 <= behind < layers:
            raise self._wrong("nextn_predict_layers", behind, f"no number of some of its {layers} layers")
        return layers - behind

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number from 1 on."""
        found = self._get(name, default)
        if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found < 2**31:
            raise self._wrong(name, found, "no whole number from 1 on")
        return found

    def check_layers(self, layers: int) -> int:
        """Return a number of layers, each of which has a tensor at least."""
        if layers > len(self.file.tensors):
            problem = f"it says {layers:,} layers, and holds {len(self.file.tensors)} tensors"
            raise ModelLoadError(self.file.path, problem, AGAIN)
        check_file_limit(self.file.path, "layers", layers)
        return layers

    def token(self, name: str) -> int:
        """The number of a token."""
        found = self.get(name)
        if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < self.rows_of("token_embd.weight", 0):
            raise self._wrong(name, found, "no token")
        return found

    def each_layer(self, name: str, default: int | None = None) -> list[int]:
        """A whole number from 0 on for each layer, of which files may have one for all from 1 on."""
        found = self.get(name)
        if not isinstance(found, list):
            return [self.count(name, default)] * self.num_layers
        if len(found) < self.num_layers or any(not isinstance(one, int) or not 0 <= one < 2**31 for one in found):
            raise self._wrong(name, found, "no whole number from 0 on for each layer")
        return [int(one) for one in found[: self.num_layers]]

    def natural(self, name: str) -> int:
        """A whole number from 0 on; 0 where the file says none."""
        return self.count(name) if self.get(name) else 0

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number: the shortest one that has the file's bits. A file has 32 bits of what a configuration says."""
        found = self._get(name, default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < float("inf"):
            raise self._wrong(name, found, "no positive number")
        narrow = np.float32(found)
        return float(str(narrow)) if narrow == found else float(found)

    def get(self, name: str) -> Any:
        """A value of the architecture, or None."""
        return self.file.metadata.get(f"{self.architecture}.{name}")

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def rows_of(self, tensor: str, default: int) -> int:
        """The rows of a tensor, where the file has it."""
        found = self.file.tensors.get(tensor)
        return default if found is None else found.shape[0]

    def refuse(self, what: str) -> UnsupportedModelError:
        """The error for something that is not known of this architecture."""
        return UnsupportedModelError(self.file.path, f"it has {what}, which is not known of GGUF files here", ORIGINAL)

    def _get(self, name: str, default: Any) -> Any:
        found = self.get(name)
        return default if found is None else found

    def _wrong(self, name: str, found: object, why: str) -> ModelLoadError:
        return ModelLoadError(self.file.path, f"its {self.architecture}.{name} is {found!r}, and {why}", AGAIN)
