"""How long a quiet tenant waits for its first token while another tenant floods the server.

    python -m benchmarks.tenants              a minute; writes benchmarks/results/tenants.json

A server of the embedded pair writes 8 texts at a time. The flood is 24 clients that ask for texts of 150 tokens, again and
again. The quiet client asks for one short text at a time, in three ways: alone; with the key of the flood, so that all
stand in one line in the order in which they came; and with a key of its own, so that the two tenants take turns. The ways
take turns in rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import httpx
import torch
from rich.console import Console
from rich.table import Table

from outrider.lab.measure.machine import describe

RESULTS = Path(__file__).parent / "results"
KEYS = "flood:loud,quiet:calm"
WAYS = {"alone": (0, "calm"), "in one line with the flood": (24, "loud"), "a tenant of its own": (24, "calm")}
LONG = {"prompt": "class Reader:\n", "max_tokens": 150, "ignore_eos": True, "temperature": 1.0}
SHORT = {"prompt": "def parse(line):\n", "max_tokens": 8, "temperature": 0, "stream": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--asks", type=int, default=4, help="short texts of a way in a round")
    parser.add_argument("--out", type=Path, default=RESULTS / "tenants.json")
    asked = parser.parse_args()
    with served() as url:
        waits, rates = asyncio.run(measured(url, asked.rounds, asked.asks))
    ways = {
        way: {
            "seconds": [round(seconds, 4) for seconds in found],
            "median": median(found),
            "nine_in_ten": quantiles(found, n=10)[-1],
            "most": max(found),
            "tokens_per_second": median(rates[way]),
        }
        for way, found in waits.items()
    }
    results = {
        "machine": describe(torch.device("cpu")),
        "command": " ".join(["python -m benchmarks.tenants", *sys.argv[1:]]),
        "ways": ways,
    }
    asked.out.write_text(json.dumps(results, indent=1, default=str) + "\n", "utf-8")
    show(ways)


@contextmanager
def served() -> Iterator[str]:
    """The address of a server in a process of its own."""
    command = [sys.executable, "-m", "outrider", "serve", "--port", "0", "--max-num-seqs", "8"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log, env={**os.environ, "OUTRIDER_API_KEYS": KEYS})
        try:
            yield address(process, log)
        finally:
            process.terminate()
            process.wait(60)


def address(process: subprocess.Popen[bytes], log: Any) -> str:
    """Where the server listens, once it does."""
    while process.poll() is None:
        log.seek(0)
        for line in log:
            if '"listening"' in line:
                return str(json.loads(line)["url"])
    raise RuntimeError("the server has ended")


async def measured(url: str, rounds: int, asks: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds to the first token, and tokens a second in all, by way."""
    waits: dict[str, list[float]] = {way: [] for way in WAYS}
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    texts = set()
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=None)) as client:
        await first_token(client, "calm")
        for _ in range(rounds):
            for way, (num_clients, key) in WAYS.items():
                flood = [asyncio.create_task(flooding(client)) for _ in range(num_clients)]
                await asyncio.sleep(1.5 if flood else 0)
                start, before = perf_counter(), await written(client)
                for _ in range(asks):
                    seconds, text = await first_token(client, key)
                    waits[way].append(seconds)
                    texts.add(text)
                rates[way].append((await written(client) - before) / (perf_counter() - start))
                for task in flood:
                    task.cancel()
                await asyncio.gather(*flood, return_exceptions=True)
    assert len(texts) == 1, "the quiet client's text depends on who else is there"
    return waits, rates


async def flooding(client: httpx.AsyncClient) -> None:
    while True:
        (await client.post("/v1/completions", json=LONG, headers=bearer("loud"))).raise_for_status()


async def first_token(client: httpx.AsyncClient, key: str) -> tuple[float, str]:
    """Seconds until the first event with text, and the whole text."""
    start, first, text = perf_counter(), None, ""
    async with client.stream("POST", "/v1/completions", json=SHORT, headers=bearer(key)) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first = perf_counter() - start if first is None else first
                text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
    assert first is not None
    return first, text


async def written(client: httpx.AsyncClient) -> float:
    """Tokens that the server has written."""
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:generation_tokens_total{"))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def show(ways: dict[str, Any]) -> None:
    table = Table("", "median, ms", "9 in 10, ms", "most, ms", "all tokens a second", title="Time to the first token")
    for way, found in ways.items():
        times = [f"{found[name] * 1e3:,.0f}" for name in ("median", "nine_in_ten", "most")]
        table.add_row(way, *times, f"{found['tokens_per_second']:,.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
