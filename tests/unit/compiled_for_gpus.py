"""Compiles the Triton kernels for a GPU of some compute capability, which needs no GPU.

`python -m tests.unit.compiled_for_gpus 90 whole` writes a line of JSON for each kernel: its name, the type of its first
argument, and how many bytes of shared memory it takes. With `ptx` in place of `whole` it ends before NVIDIA's assembler,
which takes most of the time and has no part in these. It is a process of its own, since a process either interprets the
kernels or compiles them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

from outrider.kernels.triton import attention, rows, sampling
from outrider.kernels.triton import attention as kv_write

#: A kernel, the types of its arguments by name, and its constants.
Case = tuple[Any, dict[str, str], dict[str, Any]]
I32, F32 = "*i32", "*fp32"


def attention_cases() -> Iterator[Case]:
    rows = dict.fromkeys(("firsts", "tiles", "positions", "path_at", "paths", "tables"), I32)
    found = dict.fromkeys(("all_sums", "all_largest", "all_totals"), F32)
    for dtype, dim, trees in (("bf16", 128, True), ("bf16", 128, False), ("fp16", 256, False), ("fp32", 256, False)):
        queries = attention.QUERIES if dim <= 128 else attention.QUERIES_OF_WIDE_HEADS
        sizes = {"GROUP": 4, "QUERIES": queries, "SPLIT": attention.SPLIT, "DIM": dim, "PADDED": dim}
        memory = dict.fromkeys(("query", "keys", "values"), f"*{dtype}")
        form = {"SOFTCAP": 30.0 * trees, "TILE": attention.TILE, "BLOCK": 16, "TREES": trees}
        yield attention._find, {**memory, **rows, **found, "first_row": "i32", "scale": "fp32"}, {**form, **sizes}
        taken = {"sinks": f"*{dtype}", "firsts": I32, "tiles": I32, "positions": I32, "out": f"*{dtype}"}
        numbers = {"first_row": "i32", "num_splits": "i32"}
        yield attention._fold, {**found, **taken, **numbers}, {"SINKS": trees, **sizes}


def kv_cases() -> Iterator[Case]:
    strides = dict.fromkeys(("key_row", "key_head", "value_row", "value_head"), "i32")
    sizes = {"HEADS": 8, "KEY_DIM": 80, "VALUE_DIM": 80, "WIDTH": 1024}
    for dtype in ("bf16", "fp16", "fp32"):
        rows = dict.fromkeys(("keys", "values", "key_memory", "value_memory"), f"*{dtype}")
        yield kv_write._write, {**rows, "slots": "*i64", **strides}, sizes


def sampling_cases() -> Iterator[Case]:
    cuts = dict.fromkeys(("temperatures", "nuclei", "floors", "counts"), "*fp64")
    for real, bits in (("*fp32", 32), ("*fp64", 64)):
        rows = {"logits": real, "stride": "i32", **cuts, "probs": real, "size": "i32"}
        sizes = {"BITS": bits, "ENTRIES": sampling._PROBABILITY_ENTRIES, "DIGITS": sampling.DIGITS}
        yield sampling._target_probs, rows, sizes


def draw_cases() -> Iterator[Case]:
    places = dict.fromkeys(("target_group", "target_row", "draft_group", "draft_row", "size"), "i32")
    for real in ("*fp32", "*fp64"):
        rows = {"probs": real, "stride": "i32", "noise": "*i64", "tokens": "*i64", "size": "i32"}
        yield sampling._race, rows, {"ENTRIES": sampling._DRAW_ENTRIES}
        yield sampling._invert, rows, {"ENTRIES": sampling._DRAW_ENTRIES}
        reals = dict.fromkeys(("target", "draft", "weights", "mass", "probs"), real)
        yield sampling._debt, {**reals, **places}, {"ENTRIES": sampling._DRAW_ENTRIES, "PROBS": True}


def row_cases() -> Iterator[Case]:
    strides = dict.fromkeys(("query_head", "query_row", "key_head", "key_row", "cos_row", "sin_row"), "i32")
    for dtype in ("bf16", "fp16", "fp32"):
        taken = dict.fromkeys(("rows", "weight", "out"), f"*{dtype}")
        for form in rows.NormForm:
            sizes = {"FORM": int(form), "SIZE": 4096, "PADDED": 4096}
            yield rows._rms_norm, {**taken, "row_stride": "i32", "eps": "fp32"}, sizes
        taken = dict.fromkeys(("query", "key", "cos", "sin", "query_out", "key_out"), f"*{dtype}")
        yield rows._rotate, {**taken, **strides}, {"HEADS": 32, "KV_HEADS": 8, "DIM": 80, "PADDED": 64}


def without_assembler() -> None:
    """Let the compiler end where it would call NVIDIA's assembler."""
    add = CUDABackend.add_stages

    def add_stages(self: Any, stages: dict[str, Any], *arguments: Any) -> None:
        add(self, stages, *arguments)
        stages["cubin"] = lambda source, metadata: b""

    CUDABackend.add_stages = add_stages


def compiled(case: Case, capability: int) -> dict[str, Any]:
    kernel, types, constants = case
    first = types[kernel.arg_names[0]]
    types = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, types, constants)
    stages = attention.STAGES_OF_FLOAT32 if first == F32 else attention.STAGES
    made = triton.compile(source, GPUTarget("cuda", capability, 32), {**attention.OPTIONS, "num_stages": stages})
    return {"kernel": kernel.__name__, "of": first, "shared": made.metadata.shared}


if __name__ == "__main__":
    capability, depth = int(sys.argv[1]), sys.argv[2]
    if depth == "ptx":
        without_assembler()
    for cases in (attention_cases, kv_cases, sampling_cases, draw_cases, row_cases):
        for each in cases():
            sys.stdout.write(json.dumps(compiled(each, capability)) + "\n")
