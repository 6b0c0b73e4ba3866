"""Measures how much of the processor other work kept busy while something was measured."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

#: The share of our threads' time that others may take before our times are doubtful.
_LITTLE = 0.1
_STAT = Path("/proc/stat")
#: Where the columns of that file are that count idle time.
_IDLE = (3, 4)


@dataclass(frozen=True)
class Load:
    """The load of a machine during a measurement.

    Attributes:
        others: The cores that other work kept busy, on average. None where the system does not tell.
        cores: The cores of the machine.
        threads: The threads that compute for us.
    """

    others: float | None
    cores: int
    threads: int

    @property
    def disturbs(self) -> bool:
        """Whether our threads had to wait for other work."""
        return self.others is not None and self.others > self.cores - self.threads + _LITTLE * self.threads

    def __str__(self) -> str:
        if self.others is None:
            return "the load of the machine is not known"
        return f"other work kept {self.others:.1f} of {self.cores} cores busy"


class LoadWatch:
    """Watches the load of the machine from the moment it is made."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = perf_counter(), _busy_seconds(), _own_seconds()

    def load(self) -> Load:
        """The load since then."""
        cores, threads = os.cpu_count() or 1, torch.get_num_threads()
        busy, seconds = _busy_seconds(), perf_counter() - self._began
        if busy is None or self._busy is None or seconds <= 0.0:
            return Load(None, cores, threads)
        others = (busy - self._busy - (_own_seconds() - self._own)) / seconds
        return Load(min(max(others, 0.0), float(cores)), cores, threads)


def _busy_seconds() -> float | None:
    """The seconds that all cores together have been busy, or were taken by another machine. Linux alone tells."""
    try:
        counts = [int(count) for count in _STAT.read_text("ascii").splitlines()[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return None
    idle = sum(counts[place] for place in _IDLE)
    return float(sum(counts) - idle) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """The seconds that this process and those it has started computed. Other engines that are measured run in these."""
    times = os.times()
    ended = times.user + times.system + times.children_user + times.children_system
    return ended + sum(_seconds_of(child) for child in _children("self"))


def _seconds_of(process: str) -> float:
    """The seconds that another process computed, with those that it has started. Zero where it has ended by now."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return own + sum(_seconds_of(child) for child in _children(process))


def _children(process: str) -> list[str]:
    found: list[str] = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended
            found += file.read_text("ascii").split()
    return found
