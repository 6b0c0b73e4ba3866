"""Runs the tests of the kernels and of the engine over them on the GPU itself."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.gpu.record import Record

FILES = ("tests/unit/test_triton_attention.py", "tests/unit/test_triton_sampling.py")
FILES += ("tests/model/test_triton_backend.py", "tests/model/test_graphs.py", "tests/unit/test_triton_rows.py")


def kernel_tests(record: Record, device: torch.device) -> None:
    record.step("tests", lambda: passed(device))


def passed(device: torch.device) -> dict[str, Any]:
    how = ["-q", "-p", "no:cacheprovider", "-W", "default", "--tb=short"]
    if device.type == "cuda" and find_spec("xdist"):
        how += ["-n", "6"]  # the compiler keeps a core busy for each
    done = subprocess.run([sys.executable, "-m", "pytest", *how, *FILES], capture_output=True, text=True, timeout=190)
    lines = (done.stdout + done.stderr).splitlines()
    end = [line[:300] for line in lines if "nanobind" not in line and "leaked" not in line][-100:]
    return {"right": done.returncode == 0, "status": done.returncode, "end": end}
