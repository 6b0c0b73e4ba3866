"""The embedded pair and its wide copy: plain against speculative decoding, and what a verify pass costs.

    python -m benchmarks.default_pair             some minutes; writes benchmarks/results/
    python -m benchmarks.default_pair --only wide:float32     one part; parts of one machine add up
    python -m benchmarks.default_pair --quick     a short look, writes nothing

Every configuration is run in turn, round after round, so that a slow moment of the machine hits all alike. Figures are
medians over rounds; ratios are taken within a round. At temperature 1 requests are unseeded (block verification); greedy
figures carry the share of repeated 8-grams, since a looping text flatters every proposer.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from recipes.widen import widen
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.prompts import PROMPTS
from outrider import LLM, SamplingParams, SpeculationConfig, __version__
from outrider.llm import default_model
from outrider.model.batch import Segment

ROOT = Path(__file__).resolve().parents[1]
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
console = Console()


@dataclass(frozen=True)
class Workload:
    """One model in one precision under one load."""

    model: str
    dtype: str
    sampling: str
    batch: int

    def __str__(self) -> str:
        return f"{self.model}, {self.dtype}, {self.sampling}, batch {self.batch}"


@dataclass(frozen=True)
class Run:
    """One timed generation over `batch` prompts."""

    tokens_per_second: float
    tau: float
    acceptance_rate: float
    repeated: float
    shares: dict[str, float]


def proposers() -> dict[str, SpeculationConfig]:
    draft = default_model("draft")
    return {
        "none": SpeculationConfig(),
        **{
            f"draft_model k={k}": SpeculationConfig(proposer="draft_model", draft_model=draft, num_draft_tokens=k)
            for k in (3, 5)
        },
        "ngram k=3": SpeculationConfig(proposer="ngram", num_draft_tokens=3),
    }


def model_path(name: str, dtype: str) -> str:
    if name == "starter":
        return default_model("target")
    folder = ROOT / ".cache" / f"wide-{dtype}"
    if not (folder / "config.json").exists():
        widen(default_model("target"), str(folder), hidden=4, ffn=8, dtype=getattr(torch, dtype))
    return str(folder)


def repeated_8grams(tokens: tuple[int, ...]) -> float:
    """Share of 8-grams that stood before in the same text."""
    grams = Counter(tokens[i : i + 8] for i in range(len(tokens) - 7))
    total = sum(grams.values())
    return (total - len(grams)) / total if total else 0.0


def timed_run(llm: LLM, load: Workload, config: SpeculationConfig, num_tokens: int, turn: int) -> Run:
    first = turn * load.batch % len(PROMPTS)
    prompts = [PROMPTS[(first + i) % len(PROMPTS)] for i in range(load.batch)]
    temperature = 0.0 if load.sampling == "greedy" else 1.0
    llm.stats.reset()
    start = perf_counter()
    outputs = llm.generate(
        prompts, SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True), speculation=config
    )
    seconds = perf_counter() - start
    stats = llm.stats.finished.freeze()
    return Run(
        load.batch * num_tokens / seconds,
        stats.mean_acceptance_length,
        stats.acceptance_rate,
        median(repeated_8grams(o.token_ids) for o in outputs),
        llm.stats.shares(),
    )


def row_costs(llm: LLM, repeats: int) -> dict[int, float]:
    """Median seconds of a pass by number of rows, behind a context of 128 tokens; counts interleaved."""
    runner = llm.engine.runner
    table = runner.blocks.allocate(runner.blocks.blocks_for(128 + max(ROWS)))
    runner.forward([Segment([1] * 128, 0, table)])
    times: defaultdict[int, list[float]] = defaultdict(list)
    for _ in range(repeats):
        for rows in ROWS:
            start = perf_counter()
            runner.forward([Segment(list(range(rows)), 128, table)])
            times[rows].append(perf_counter() - start)
    runner.blocks.free(table)
    return {rows: median(values) for rows, values in times.items()}


def summary(load: Workload, name: str, runs: list[Run], plain: list[Run], cost: dict[int, float]) -> dict[str, Any]:
    """One row of the table: medians, and the speedup predicted from tau and the measured cost of a pass."""
    speedup = median(r.tokens_per_second / p.tokens_per_second for r, p in zip(runs, plain, strict=True))
    tau = median(r.tau for r in runs)
    length = int(name.partition("=")[2] or 0)
    shares = {phase: median(r.shares[phase] for r in runs) for phase in runs[0].shares}
    row_cost = cost[length + 1] / cost[1] if load.batch == 1 else None
    speeds = sorted(r.tokens_per_second for r in runs)
    return {
        **asdict(load),
        "proposer": name,
        "tokens_per_second": median(speeds),
        "spread": [speeds[0], speeds[-1]],
        "speedup": speedup,
        "tau": tau,
        "acceptance_rate": median(r.acceptance_rate for r in runs),
        "eta": speedup / tau,
        "cost_of_rows": row_cost,
        "predicted_speedup": tau * shares["forward"] / row_cost if row_cost and length else None,
        "repeated_8grams": median(r.repeated for r in runs),
        "shares": shares,
    }


def measure(name: str, dtype: str, *, quick: bool, progress: Progress) -> tuple[list[dict[str, Any]], dict[int, float]]:
    """All loads of one model in one precision."""
    llm = LLM(model_path(name, dtype), dtype=dtype, max_num_seqs=8)
    cost = row_costs(llm, 3 if quick else 9)
    rows = []
    for sampling, batch in (("T=1", 1), ("greedy", 1), ("T=1", 8), ("greedy", 8)):
        load = Workload(name, dtype, sampling, batch)
        rounds = 2 if quick or batch > 1 else 3
        num_tokens = 16 if quick else (24 if name == "wide" else 96) // (1 if batch == 1 else 2)
        runs: dict[str, list[Run]] = defaultdict(list)
        task = progress.add_task(str(load), total=rounds * len(proposers()))
        for turn in range(rounds):
            for label, config in proposers().items():
                runs[label].append(timed_run(llm, load, config, num_tokens, turn))
                progress.advance(task)
        rows += [summary(load, label, found, runs["none"], cost) for label, found in runs.items()]
    return rows, cost


def hardware() -> dict[str, Any]:
    import transformers

    facts = Path("/proc/cpuinfo")
    lines = facts.read_text("utf-8").splitlines() if facts.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "outrider": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


COLUMNS = (
    "load",
    "proposer",
    "tokens/s",
    "speedup",
    "tau",
    "accepted",
    "eta",
    "propose/forward/verify/host %",
    "repeated 8-grams",
)


def cells(row: dict[str, Any]) -> list[str]:
    shares = "/".join(f"{100 * row['shares'][p]:.0f}" for p in ("propose", "forward", "verify", "host"))
    load = f"{row['model']}, {row['dtype']}, {row['sampling']}, batch {row['batch']}"
    drafted = row["proposer"] != "none"
    return [
        load,
        row["proposer"],
        f"{row['tokens_per_second']:.1f} ({row['spread'][0]:.1f}-{row['spread'][1]:.1f})",
        f"{row['speedup']:.2f}x" if drafted else "1",
        f"{row['tau']:.2f}" if drafted else "",
        f"{row['acceptance_rate']:.0%}" if drafted else "",
        f"{row['eta']:.2f}" if drafted else "",
        shares,
        f"{row['repeated_8grams']:.0%}",
    ]


def markdown(result: dict[str, Any]) -> str:
    machine = result["hardware"]
    lines = [
        "# Default pair",
        "",
        f"{machine['cpu']}, {machine['instruction_set']}, {machine['threads']} threads, torch {machine['torch']}, "
        f"transformers {machine['transformers']}, Python {machine['python']}. Made by `python -m benchmarks.default_pair`.",
        "Medians with the range over interleaved rounds; speedup is over our own plain decoding in the same round; "
        "tau is the mean acceptance length; eta = speedup / tau.",
        "",
        "## Cost of rows, C(n) = T(n) / T(1)",
        "",
        "| model | T(1) ms | " + " | ".join(f"n={n}" for n in ROWS) + " |",
        "|---|---|" + "---|" * len(ROWS),
    ]
    for label, cost in result["cost"].items():
        ratios = " | ".join(f"{cost[n] / cost[1]:.2f}" for n in ROWS)
        lines.append(f"| {label} | {1e3 * cost[1]:.1f} | {ratios} |")
    lines += ["", "## Decoding", "", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in result["rows"]]
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2))
    for label, cost in result["cost"].items():
        left.plot(ROWS, [cost[n] / cost[1] for n in ROWS], marker="o", label=label)
    left.axhline(1, color="grey", lw=0.8)
    left.set(xlabel="rows in a pass", ylabel="T(n) / T(1)", title="What checking n rows costs", ylim=(0, None))
    left.legend(frameon=False)
    rows = [r for r in result["rows"] if r["model"] == "wide" and r["proposer"] != "none"]
    labels = [f"{r['dtype']}, {r['sampling']}, batch {r['batch']}, {r['proposer']}" for r in rows]
    colours = ["tab:green" if r["speedup"] >= 1 else "tab:red" for r in rows]
    right.barh(labels, [r["speedup"] for r in rows], color=colours)
    right.axvline(1, color="black", lw=0.8)
    right.invert_yaxis()
    right.tick_params(axis="y", labelsize=6)
    right.set(xlabel="speedup over plain decoding", title="Wide target, 0.36 B parameters")
    figure.tight_layout()
    for suffix in ("png", "svg"):
        figure.savefig(folder / f"default_pair.{suffix}", dpi=130)


def load_result(out: Path) -> dict[str, Any]:
    """What earlier runs on this machine left, to which this one adds."""
    file = out / "default_pair.json"
    old = json.loads(file.read_text("utf-8")) if file.exists() else {}
    if old.get("hardware") != hardware():
        return {"hardware": hardware(), "cost": {}, "rows": []}
    old["cost"] = {label: {int(n): t for n, t in cost.items()} for label, cost in old["cost"].items()}
    return old


def store(result: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "default_pair.json").write_text(json.dumps(result, indent=1), "utf-8")
    (out / "default_pair.md").write_text(markdown(result), "utf-8")
    plot(result, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append", help="model:dtype, as wide:float32; may be repeated")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    from transformers.utils import logging

    logging.disable_progress_bar()
    result = load_result(args.out)
    with Progress(console=console) as progress:
        for name in ("wide", "starter"):
            for dtype in ("float32", "bfloat16"):
                if args.only and f"{name}:{dtype}" not in args.only:
                    continue
                rows, cost = measure(name, dtype, quick=args.quick, progress=progress)
                kept = [row for row in result["rows"] if (row["model"], row["dtype"]) != (name, dtype)]
                result["rows"], result["cost"][f"{name}, {dtype}"] = kept + rows, cost
                if not args.quick:
                    store(result, args.out)
    table = Table(*COLUMNS, header_style="bold")
    for row in result["rows"]:
        table.add_row(*cells(row))
    console.print(table)


if __name__ == "__main__":
    main()
