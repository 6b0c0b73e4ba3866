"""The Triton kernels compile for the GPUs of three generations, and fit into their shared memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.warm import warm_python

pytest.importorskip("triton", reason="Triton is not installed")

#: Bytes of shared memory that a program may have, by compute capability.
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


def compiled(capability: int, folder: Path, *names: str) -> list[dict[str, object]]:
    how = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    done = warm_python().run("tests.unit.compiled_for_gpus", str(capability), *names, timeout=600, **how)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow  # the compiler takes ten seconds for a kernel of attention
@pytest.mark.parametrize("capability", SHARED)
def test_every_kernel_compiles(capability: int, tmp_path: Path) -> None:
    kernels = compiled(capability, tmp_path)
    names = {"_find", "_fold", "_write", "_target_probs", "_race", "_invert", "_debt"}
    assert {each["kernel"] for each in kernels} == names
    assert all(each["shared"] <= SHARED[capability] for each in kernels)


def test_a_small_kernel_compiles(tmp_path: Path) -> None:
    assert [each["kernel"] for each in compiled(90, tmp_path, "kv")] == ["_write"]
