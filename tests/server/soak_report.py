"""What a run of many clients came to: a table, a plot, and the figures."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

_MIB = 2**20


def write_report(folder: Path, found: dict[str, Any], told: dict[str, Any]) -> None:
    """Print the table, and write it with the figures and the plot.

    Args:
        folder: Where to; it is made if it is missing.
        found: The fields of the findings.
        told: What they come to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = _rows(found, told)
    seen = [{name: round(value, 3) for name, value in row.items()} for row in found["seen"]]
    over_time = {name: [row[name] for row in seen] for name in seen[0]}
    figures = {"load": found["load"], "rows": rows, **told, "over_time": over_time}
    (folder / "soak.json").write_text(json.dumps(figures) + "\n", "utf-8")
    lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
    (folder / "soak.md").write_text("\n".join([*lines, ""]), "utf-8")
    _plot(folder / "soak.png", found)
    table = Table("", "", title="Many clients on one server")
    for row in rows.items():
        table.add_row(*row)
    console = Console()
    console.print(table)
    for problem in told["problems"][:20]:
        console.print(problem, style="red", markup=False)


def _rows(found: dict[str, Any], told: dict[str, Any]) -> dict[str, str]:
    load, asked, after = found["load"], found["asked"], found["after"]
    waits = sorted(request["first"] - request["asked"] for request in asked if request["first"] is not None)
    kinds = Counter(request["kind"] for request in asked)
    methods = Counter(request["method"] for request in asked)
    tokens, seconds = after["generation_tokens"], max(request["ended"] or 0.0 for request in asked)
    memory = [row["process_resident_memory_bytes"] / _MIB for row in found["seen"]]
    return {
        "clients, seconds": f"{load['clients']}, {load['seconds']:g}",
        "requests": f"{len(asked):,}: " + ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items())),
        "by method": ", ".join(f"{name} {count:,}" for name, count in sorted(methods.items())),
        "tokens written": f"{tokens:,.0f} ({tokens / seconds:,.0f} a second)",
        "seconds to the first piece": f"median {np.median(waits):.2f}, 99 % {np.quantile(waits, 0.99):.2f}, "
        f"most {waits[-1]:.2f}",
        "most requests that overtook one": str(told["overtaken"]),
        "memory, MiB": f"first {memory[0]:.0f}, after a third {memory[len(memory) // 3]:.0f}, last {memory[-1]:.0f}",
        "growth of memory after a third": f"{100 * (told['growth'] - 1):+.1f} %",
        "texts that lost their memory for a while": f"{after['preemptions']:,.0f}",
        "faults of proposers": f"{after['proposer_faults']:,.0f}",
        "open files, most and at the end": f"{max(row['process_open_fds'] for row in found['seen']):.0f}, "
        f"{after['process_open_fds']:.0f}",
        "problems": str(len(told["problems"])),
    }


def _plot(path: Path, found: dict[str, Any]) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    seen = found["seen"]
    seconds = [row["seconds"] for row in seen]
    figure, (upper, lower) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 5), layout="constrained")
    upper.plot(seconds, [row["process_resident_memory_bytes"] / _MIB for row in seen], color="tab:red")
    upper.set(ylabel="memory of the server, MiB", ylim=(0, None))
    for name in ("running", "waiting"):
        lower.plot(seconds, [row[f"num_requests_{name}"] for row in seen], label=name)
    lower.set(xlabel="seconds", ylabel="texts", ylim=(0, None))
    lower.legend()
    figure.suptitle(f"{found['load']['clients']} streaming clients, a third of which leaves in the middle")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
