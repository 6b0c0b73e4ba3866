"""The name of the processor."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    """The name that the system gives to the processor; empty where it gives none."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text("utf-8").splitlines() if facts.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
