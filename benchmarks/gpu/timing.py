"""Times on a GPU, by its own events."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def first_seconds(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """What a first call returns, and its wall time: for a kernel, that of compiling it."""
    synchronise(device)
    begin = time.perf_counter()
    found = work()
    synchronise(device)
    return found, round(time.perf_counter() - begin, 3)


def milliseconds(work: Callable[[], Any], device: torch.device, repeats: int = 20) -> float:
    """The median time of a call on the device, in ms. What the host does between two calls is part of it."""
    if device.type != "cuda":
        repeats = 1
    spans = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            spans.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            work()
            spans.append(1000 * (time.perf_counter() - start))
    return round(median(spans), 4)
