"""The Triton kernels compile for the GPUs of three generations, and fit into their shared memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.warm import warm_python

pytest.importorskip("triton", reason="Triton is not installed")

#: Bytes of shared memory that a program may have, by compute capability.
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
#: Every kernel, and the types that its first argument may have.
KERNELS = {
    "_find": {"*bf16", "*fp16", "*fp32"},
    "_fold": {"*fp32"},
    **{kernel: {"*bf16", "*fp16", "*fp32"} for kernel in ("_write", "_rms_norm", "_rotate")},
    **{kernel: {"*fp32", "*fp64"} for kernel in ("_target_probs", "_race", "_invert", "_debt")},
}


def check(capability: int, depth: str, folder: Path) -> None:
    how = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    done = warm_python().run("tests.unit.compiled_for_gpus", str(capability), depth, timeout=600, **how)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert {each: {k["of"] for k in kernels if k["kernel"] == each} for each in {k["kernel"] for k in kernels}} == KERNELS
    assert all(each["shared"] <= SHARED[capability] for each in kernels)


@pytest.mark.by_change(
    "src/outrider/kernels/triton/", "tests/unit/compiled_for_gpus.py", "pyproject.toml", "constraints.txt"
)
def test_every_kernel_compiles(tmp_path: Path) -> None:
    """For the GPUs of one generation; what NVIDIA's assembler says to it is left to the slow test."""
    check(90, "ptx", tmp_path)


@pytest.mark.slow  # the assembler takes seconds for a kernel
@pytest.mark.parametrize("capability", SHARED)
def test_every_kernel_compiles_to_machine_code(capability: int, tmp_path: Path) -> None:
    check(capability, "whole", tmp_path)
