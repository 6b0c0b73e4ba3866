"""How much of their prompts do replicas find in their caches, if requests go where the beginning was read, or anywhere?

    python -m benchmarks.replica_routing      two minutes; writes benchmarks/results/replica_routing.json

Two replicas of the embedded pair (extra `ray`). Conversations go on for some turns: each prompt is the one before, with the
text that was written and a new line behind it. Several clients work at a time. The same requests are made with our router
and with one that draws a replica by chance. The smaller KV memories hold all conversations once together, and not twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.tenants import address
from outrider.lab.measure.machine import describe

RESULTS = Path(__file__).parent / "results"
WAYS = ("by prefix", "at random")
MEMORIES = (16384, 3072)
LINES = ("def {0}_{1}(self, value):\n", "class {0}{1}(Reader):\n", "# {0} {1}: read the next line and split it\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--out", type=Path, default=RESULTS / "replica_routing.json")
    asked = parser.parse_args()
    found = []
    for memory in MEMORIES:
        for way in WAYS:
            with served(way, memory) as url:
                totals = asyncio.run(conversed(url, asked.conversations, asked.turns, asked.clients))
            found.append({"routing": way, "kv_cache_tokens": memory, **totals})
    command = " ".join(["python -m benchmarks.replica_routing", *sys.argv[1:]])
    results = {"machine": describe(torch.device("cpu")), "command": command}
    asked.out.write_text(json.dumps({**results, "runs": found}, indent=1, default=str) + "\n", "utf-8")
    show(found)


@contextmanager
def served(way: str, memory: int) -> Iterator[str]:
    """The address of two replicas."""
    server = "outrider" if way == "by prefix" else "benchmarks.random_router"
    command = [sys.executable, "-m", server, "serve", "--replicas", "2", "--port", "0", "--kv-cache-tokens", str(memory)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log)
        try:
            yield address(process, log)
        finally:
            process.terminate()
            process.wait(60)


async def conversed(url: str, conversations: int, turns: int, clients: int) -> dict[str, Any]:
    """Prompt tokens, and how many of them were found in a cache."""
    places, order = asyncio.Semaphore(clients), random.Random(7)
    async with httpx.AsyncClient(timeout=120) as client:
        texts = [f"# module {number}\nimport os\n" for number in range(conversations)]
        usages: list[dict[str, Any]] = []

        async def say(number: int, turn: int) -> None:
            line = LINES[turn % len(LINES)].format("part", 100 * number + turn)
            body = {"prompt": texts[number] + line, "max_tokens": 48, "seed": number, "ignore_eos": True}
            async with places:
                answer = (await client.post(f"{url}/v1/completions", json=body)).raise_for_status().json()
            texts[number] = body["prompt"] + answer["choices"][0]["text"] + "\n"
            usages.append(answer["usage"])

        for turn in range(turns):
            numbers = order.sample(range(conversations), conversations)
            await asyncio.gather(*(say(number, turn) for number in numbers))
    tokens = sum(usage["prompt_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return {"prompt_tokens": tokens, "cached_tokens": cached, "share": cached / tokens}


def show(found: list[dict[str, Any]]) -> None:
    table = Table("routing", "KV tokens of a replica", "prompt tokens", "found in a cache")
    for run in found:
        table.add_row(run["routing"], f"{run['kv_cache_tokens']:,}", f"{run['prompt_tokens']:,}", f"{run['share']:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
