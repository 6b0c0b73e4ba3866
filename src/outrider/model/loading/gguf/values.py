"""The values of a GGUF file that describe its model, each checked when it is read."""

from __future__ import annotations

from typing import Any

from outrider.errors import ModelLoadError, UnsupportedModelError
from outrider.model.loading.gguf.header import GgufFile

#: What to do with a file that cannot be loaded.
ORIGINAL = 'Give the original checkpoint in safetensors; quantization="int4" rounds it while it is loaded.'
AGAIN = "Download the file again."


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

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number from 1 on."""
        found = self._get(name, default)
        if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found < 2**31:
            raise self._wrong(name, found, "no whole number from 1 on")
        return found

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        found = self._get(name, default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < float("inf"):
            raise self._wrong(name, found, "no positive number")
        return float(found)

    def get(self, name: str) -> Any:
        """A value of the architecture, or None."""
        return self.file.metadata.get(f"{self.architecture}.{name}")

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def refuse(self, what: str) -> UnsupportedModelError:
        """The error for something that is not known of this architecture."""
        return UnsupportedModelError(self.file.path, f"it has {what}, which is not known of GGUF files here", ORIGINAL)

    def _get(self, name: str, default: Any) -> Any:
        found = self.get(name)
        return default if found is None else found

    def _wrong(self, name: str, found: object, why: str) -> ModelLoadError:
        return ModelLoadError(self.file.path, f"its {self.architecture}.{name} is {found!r}, and {why}", AGAIN)
