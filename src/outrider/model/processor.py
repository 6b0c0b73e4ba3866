"""The name of the processor, and of the device that a model lies on."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def processor_name() -> str:
    """The name that the system gives to the processor; empty where it gives none."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text("utf-8").splitlines() if facts.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def device_name(device: torch.device) -> str:
    """The name of the GPU that a device is, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
