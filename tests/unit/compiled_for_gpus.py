"""Compiles the Triton kernels for a GPU of some compute capability, which needs no GPU.

`python -m tests.unit.compiled_for_gpus 90` writes a line of JSON for each kernel: its name, and how many bytes of shared
memory it takes. It is a process of its own, since a process either interprets the kernels or compiles them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from outrider.kernels.triton import attention, draws, kv_write, probabilities

#: A kernel, the types of its arguments by name, and its constants.
Case = tuple[Any, dict[str, str], dict[str, Any]]
I32, F32 = "*i32", "*fp32"


def attention_cases() -> Iterator[Case]:
    rows = dict.fromkeys(("firsts", "tiles", "positions", "path_at", "paths", "tables"), I32)
    found = dict.fromkeys(("all_sums", "all_largest", "all_totals"), F32)
    for dtype, dim, trees in (("bf16", 128, True), ("fp16", 256, False), ("fp32", 64, False)):
        queries = attention.QUERIES if dim <= 128 else attention.QUERIES_OF_WIDE_HEADS
        sizes = {"GROUP": 4, "QUERIES": queries, "SPLIT": attention.SPLIT, "DIM": dim, "PADDED": dim}
        memory = dict.fromkeys(("query", "keys", "values"), f"*{dtype}")
        form = {"SOFTCAP": 30.0 * trees, "TILE": attention.TILE, "BLOCK": 16, "TREES": trees}
        yield attention._find, {**memory, **rows, **found, "first_row": "i32", "scale": "fp32"}, {**form, **sizes}
        taken = {"sinks": f"*{dtype}", "firsts": I32, "tiles": I32, "positions": I32, "out": f"*{dtype}"}
        numbers = {"first_row": "i32", "num_splits": "i32"}
        yield attention._fold, {**found, **taken, **numbers}, {"SINKS": trees, **sizes}


def kv_cases() -> Iterator[Case]:
    rows = dict.fromkeys(("keys", "values", "key_memory", "value_memory"), "*bf16")
    strides = dict.fromkeys(("key_row", "key_head", "value_row", "value_head"), "i32")
    sizes = {"HEADS": 8, "KEY_DIM": 80, "VALUE_DIM": 80, "WIDTH": 1024}
    yield kv_write._write, {**rows, "slots": "*i64", **strides}, sizes


def sampling_cases() -> Iterator[Case]:
    cuts = dict.fromkeys(("temperatures", "nuclei", "floors", "counts"), "*fp64")
    for real, bits in (("*fp32", 32), ("*fp64", 64)):
        rows = {"logits": real, "stride": "i32", **cuts, "probs": real, "size": "i32"}
        sizes = {"BITS": bits, "ENTRIES": probabilities.ENTRIES, "DIGITS": probabilities.DIGITS}
        yield probabilities._target_probs, rows, sizes


def draw_cases() -> Iterator[Case]:
    rows = {"probs": "*fp32", "stride": "i32", "noise": "*i64", "tokens": "*i64", "size": "i32"}
    yield draws._race, rows, {"ENTRIES": draws.ENTRIES}
    yield draws._invert, rows, {"ENTRIES": draws.ENTRIES}
    places = dict.fromkeys(("target_group", "target_row", "draft_group", "draft_row", "size"), "i32")
    reals = dict.fromkeys(("target", "draft", "weights", "mass", "probs"), "*fp32")
    yield draws._debt, {**reals, **places}, {"ENTRIES": draws.ENTRIES, "PROBS": True}


def compiled(case: Case, capability: int) -> dict[str, Any]:
    kernel, types, constants = case
    types = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, types, constants)
    made = triton.compile(source, GPUTarget("cuda", capability, 32), attention.OPTIONS)
    return {"kernel": kernel.__name__, "shared": made.metadata.shared}


if __name__ == "__main__":
    sizes_of = {"attention": attention_cases, "kv": kv_cases, "sampling": sampling_cases, "draws": draw_cases}
    for name in sys.argv[2:] or sizes_of:
        for each in sizes_of[name]():
            sys.stdout.write(json.dumps(compiled(each, int(sys.argv[1]))) + "\n")
