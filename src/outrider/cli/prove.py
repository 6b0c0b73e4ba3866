from __future__ import annotations


def prove() -> None:
    """Stub."""
