"""Settings that all methods with heads from a folder share."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from outrider.errors import InvalidParameterError
from outrider.heads.running import RunningHeads, open_heads
from outrider.propose.method import Method, ProposerContext


class FolderMethod(Method):
    """Heads from a folder.

    Attributes:
        model: Local folder of the heads.
        min_confidence: Nothing is drafted behind a token whose own draft probability is smaller. The token itself stays.
    """

    name: ClassVar[str] = "heads"

    model: str | None = Field(None, min_length=1, description="Use a local folder.")
    min_confidence: float = Field(0.0, ge=0.0, le=1.0, description="Use 0 to 1.")

    def folder(self) -> str:
        """The folder.

        Raises:
            InvalidParameterError: None is named.
        """
        if self.model is None:
            remedy = "Give the local folder of heads that were trained for this target."
            raise InvalidParameterError("model", None, f"method={self.name!r} needs one", remedy)
        return self.model


class HeadMethod(FolderMethod):
    """Heads that were trained for this target, as this package writes them."""

    def open(self, context: ProposerContext) -> RunningHeads:
        """The heads.

        Raises:
            InvalidParameterError: No folder is named, or there is no such folder.
            ModelLoadError: It holds no heads that can be read.
            HeadMismatchError: They are of another kind, or were made for another target.
        """
        return open_heads(self.folder(), self.name, context.target)
