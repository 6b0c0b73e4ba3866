"""The engine's own choice (`auto`) beside plain decoding, in paired and interleaved rounds.

python -m benchmarks.governor --wide --dtype bfloat16 --rounds 24 --max-tokens 64 --out benchmarks/results/governor.json

`--out` of a run that measured other cells keeps them, so that a long table can be measured in parts; beside the file it
writes a heat map.

A cell is a workload and a batch size. In a round both ways write the same prompts, and which one begins alternates. The
table gives the median of the ratios of decoding speeds with the lower end of the 95% range of a bootstrap over rounds, and
the ratio of the times to the first token. In a replay the engine may choose a lookup alone, since a draft model would
always be right there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from outrider import LLM, SpeculationConfig
from outrider.config import default_model
from outrider.lab.measure.decoding_config import DecodingConfig
from outrider.lab.measure.machine import describe
from outrider.lab.measure.tasks import Task, built_in
from outrider.lab.measure.writing import EncodedTask, Run, copy_tasks, write
from outrider.widen import wide_target

WORKLOADS = ("code_completion", "json", "replay")
PLAIN = DecodingConfig("plain", SpeculationConfig())


def encoded(llm: LLM, tasks: list[Task], batch: int, turn: int, max_tokens: int) -> list[EncodedTask]:
    """The prompts of one round: as many as the batch holds, others in each round."""
    tokenizer, found = llm.tokenizer, []
    assert tokenizer is not None
    for place in range(batch):
        task = tasks[(turn * batch + place) % len(tasks)]
        answer = None if task.answer is None else tuple(tokenizer.encode(task.answer, add_special_tokens=False))
        length = max_tokens if answer is None else min(max_tokens, len(answer))
        ids = tuple(tokenizer.encode(task.prompt))
        found.append(EncodedTask(task.name, ids, length, None if answer is None else answer[:length]))
    return found


def cell(llm: LLM, workload: str, batch: int, rounds: int, max_tokens: int, draft: str) -> dict[str, Any]:
    """Ratios of auto to plain, by round."""
    tasks = copy_tasks() if workload == "replay" else built_in(workload)
    members = ["suffix"] if workload == "replay" else [{"method": "draft_model", "model": draft}, "suffix"]
    longest = [{**SpeculationConfig.of(each).as_mapping(), "num_draft_tokens": 16} for each in members]
    auto = DecodingConfig("auto", SpeculationConfig.of({"method": "auto", "methods": longest}))
    speeds, firsts, chosen = [], [], {}
    for turn in range(-1, rounds):  # the first round warms up
        texts = encoded(llm, tasks, batch, max(turn, 0), max_tokens)
        runs: dict[str, Run] = {}
        for way in (PLAIN, auto) if turn % 2 else (auto, PLAIN):
            runs[way.name] = write(llm, texts, way, 1.0)
            if way is auto:
                for (method, length), count in llm.stats.chosen.items():
                    chosen[f"{method} {length}"] = chosen.get(f"{method} {length}", 0) + count
        if turn >= 0:
            speeds.append((runs["auto"].tokens_per_second or 0.0) / (runs["plain"].tokens_per_second or 1.0))
            firsts.append(max(runs["auto"].first_token_seconds) / max(runs["plain"].first_token_seconds))
    return {"workload": workload, "batch": batch, "speedup": speeds, "first_token": firsts, "chosen": chosen}


def lower_bound(ratios: list[float]) -> float:
    """The lower end of the 95% range of the median, by a bootstrap over rounds."""
    rng = np.random.default_rng(0)
    drawn = np.median(rng.choice(ratios, (4000, len(ratios))), 1)
    return float(np.percentile(drawn, 2.5))


def keep(path: Path, machine: dict[str, Any], cells: list[dict[str, Any]]) -> None:
    """Write the figures, beside those of other cells that are there, and draw all of them."""
    known = json.loads(path.read_text("utf-8"))["cells"] if path.exists() else []
    new = {(each["workload"], each["batch"]) for each in cells}
    found = [each for each in known if (each["workload"], each["batch"]) not in new] + cells
    found.sort(key=lambda each: (WORKLOADS.index(each["workload"]), each["batch"]))
    path.write_text(json.dumps({"machine": machine, "cells": found}), "utf-8")
    draw(found, path.with_suffix(".png"))


def draw(cells: list[dict[str, Any]], path: Path) -> None:
    """A heat map: the speedup of auto by workload and batch."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    workloads = [each for each in WORKLOADS if any(found["workload"] == each for found in cells)]
    batches = sorted({found["batch"] for found in cells})
    grid = np.full((len(workloads), len(batches)), np.nan)
    for found in cells:
        grid[workloads.index(found["workload"]), batches.index(found["batch"])] = np.median(found["speedup"])
    figure, axes = plt.subplots(figsize=(1.6 + 1.1 * len(batches), 1.0 + 0.7 * len(workloads)))
    axes.imshow(np.log2(grid), cmap="RdYlGn", vmin=-2, vmax=2, aspect="auto")
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_yticks(range(len(workloads)), [each.replace("_", " ") for each in workloads])
    axes.set_xlabel("texts at a time")
    axes.set_title("auto over plain decoding", fontsize=10)
    for (row, column), value in np.ndenumerate(grid):
        axes.text(column, row, "" if np.isnan(value) else f"{value:.2f}x", ha="center", va="center", color="black")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--workload", action="append", choices=WORKLOADS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    target = wide_target(given.dtype) if given.wide else default_model("target")
    llm = LLM(target, dtype=given.dtype, speculation="none", prefix_caching=False, max_num_seqs=32)
    cells = []
    for workload in given.workload or WORKLOADS:
        for batch in given.batch or (1, 4, 8, 16, 32):
            begun = perf_counter()
            found = cell(llm, workload, batch, given.rounds, given.max_tokens, default_model("draft"))
            cells.append({**found, "seconds": perf_counter() - begun})
            middle, first = float(np.median(found["speedup"])), float(np.median(found["first_token"]))
            low = lower_bound(found["speedup"])
            speed = f"{middle:.3f}x (at least {low:.3f}x)  first token {first:.3f}x"
            print(f"{workload:16} batch {batch:2}  {speed}  in {cells[-1]['seconds']:.0f} s", flush=True)
            if given.out is not None:
                keep(given.out, describe(llm.engine.runner.loaded.device), cells)


if __name__ == "__main__":
    main()
