"""The model pair that comes with the package."""

from __future__ import annotations

from importlib.resources import files


def default_model(part: str) -> str:
    """Folder of the embedded default pair: part is "target" or "draft"."""
    return str(files("outrider") / "assets" / part)


def shown_name(model: str | None) -> str | None:
    """A model's name for people; where the package lies is of no interest to them."""
    return "embedded" if model in (default_model("target"), default_model("draft")) else model
