"""Determines how many bytes of memory this process may still take."""

from __future__ import annotations

import os
from pathlib import Path

import torch

#: The files of a control group, of version 2 and of version 1: limit, use, and what of the use can be taken back.
_VERSIONS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(device: torch.device, root: Path = Path("/")) -> int | None:
    """The memory of a device that is free, or can be freed at once, within the limits of this process.

    Args:
        device: On the CPU, the smaller of what the system has and of what the control groups of this process leave.
        root: The root of the file system, for tests.

    Returns:
        Bytes; None where the system does not say.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    found = [_of_system(root), *(_of_group(root, version) for version in _VERSIONS)]
    return min((size for size in found if size is not None), default=None)


def _of_system(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text("ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _of_group(root: Path, version: tuple[str, str, str, str]) -> int | None:
    """What the control group of this process leaves, or one that holds it. None where there is no limit."""
    mount, limit_name, use_name, cache_name = version
    mounted = root / mount
    own = mounted / _own_group(root, version is _VERSIONS[1]).lstrip("/")
    left = []
    for group in (own, *own.parents):
        if not group.is_relative_to(mounted):
            break
        try:
            limit = int((group / limit_name).read_text("ascii"))
            use = int((group / use_name).read_text("ascii"))
            stat = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        left.append(max(0, limit - use + int(stat.get(cache_name, 0))))
    return min(left, default=None)


def _own_group(root: Path, is_first_version: bool) -> str:
    """The path of this process's group, as the system tells it."""
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if ("memory" in controllers.split(",")) if is_first_version else not controllers:
            return path
    return ""
