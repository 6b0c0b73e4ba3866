"""What probabilities and verification cost over a large vocabulary, with our kernels and with stock operators.

    python -m benchmarks.large_vocabulary              half a minute; writes benchmarks/results/
    python -m benchmarks.large_vocabulary --vocab 32000 --draft-tokens 4

Eight draft tokens make nine rows. Each part of a step is timed: the target's probabilities from logits, the coins of block
verification, the residual, and the draw from it. Beside them, a race over all rows is timed, which plain and coupled
decoding run. Kernels and stock operators take turns. The figures are the median and the least, since other programs on the
machine only ever add time.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from outrider import SamplingParams
from outrider.lab.measure.machine import describe
from outrider.verify.logits import target_probs
from outrider.verify.noise import Key, KeyedNoise, Stream
from outrider.verify.rules import block_acceptance, residual

RESULTS = Path(__file__).parent / "results"
SETTINGS = {
    "T=1": SamplingParams(temperature=1.0),
    "top_p=0.95": SamplingParams(temperature=1.0, top_p=0.95),
    "T=0.7, top_k=50, top_p=0.9": SamplingParams(temperature=0.7, top_k=50, top_p=0.9),
}
KERNELS = {"kernels": "", "stock": "off"}


class Step:
    """One verification of a drafted block, part by part.

    Args:
        logits: The logits of the target [k + 1, vocab_size].
        draft_logits: The logits of the draft [k, vocab_size].
        params: The parameters of the request.
    """

    def __init__(self, logits: Tensor, draft_logits: Tensor, params: SamplingParams) -> None:
        self._logits, self._rows = logits, [params] * len(logits)
        self._draft = target_probs(draft_logits, self._rows[1:])[None]
        self._tokens = self._draft[0].multinomial(1).T
        self._turn = 0

    def run(self) -> dict[str, float]:
        """The milliseconds of each part."""
        self._turn += 1
        noise, spent = KeyedNoise(), {}
        spent["target_probs"], target = _timed(lambda: target_probs(self._logits, self._rows)[None])
        spent["coins"], (chances, weights) = _timed(lambda: block_acceptance(target, self._draft, self._tokens))
        accepted = self._accepted(noise, chances)
        at = min(accepted, self._draft.shape[1] - 1)
        rest = self._draft[:, at] * (accepted == at)
        spent["residual"], probs = _timed(lambda: residual(target[:, accepted], rest, weights[:, accepted]))
        key = Key(0, self._turn, 0, Stream.RECOVER, accepted)
        spent["draw"], _ = _timed(lambda: noise.categorical(probs, [key]))
        spent["verification"] = sum(spent.values())
        keys = [Key(0, self._turn, 0, Stream.TARGET, row) for row in range(len(self._logits))]
        spent["race, all rows"], _ = _timed(lambda: KeyedNoise().categorical(target[0], keys))
        return spent

    def _accepted(self, noise: KeyedNoise, chances: Tensor) -> int:
        keys = [Key(0, self._turn, 0, Stream.ACCEPT, row) for row in range(chances.shape[1])]
        coins = noise.bernoulli(chances[0], keys)
        return int((coins * torch.arange(1, len(coins) + 1)).amax())


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = perf_counter()
    result = work()
    return (perf_counter() - start) * 1e3, result


def measure(vocab_size: int, draft_tokens: int, rounds: int) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """The median and least milliseconds, by settings, by kernels or stock operators, and by part."""
    torch.manual_seed(0)
    logits = torch.randn(draft_tokens + 1, vocab_size) * 3
    draft_logits = logits[:-1] + torch.randn(draft_tokens, vocab_size) * 0.5
    found: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for name, params in SETTINGS.items():
        step = Step(logits, draft_logits, params)
        spent: dict[str, list[dict[str, float]]] = {way: [] for way in KERNELS}
        for _ in range(rounds):
            for way, choice in KERNELS.items():
                os.environ["OUTRIDER_KERNELS"] = choice
                spent[way].append(step.run())
        found[name] = {way: _summary(runs[1:]) for way, runs in spent.items()}  # the first runs warm up
    return found


def _summary(runs: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    return {part: {"median": median(r[part] for r in runs), "least": min(r[part] for r in runs)} for part in runs[0]}


def main() -> None:
    """Measure, print the figures, and write them to a file."""
    parser = argparse.ArgumentParser(description="Probabilities and block verification over a large vocabulary.")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--draft-tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    machine = describe(torch.device("cpu"))  # before the kernels are turned off, so that it names them
    found = measure(arguments.vocab, arguments.draft_tokens, arguments.rounds)
    table = Table("settings", "part", "kernels, ms", "least", "stock, ms", "least")
    for name, ways in found.items():
        for part in ways["kernels"]:
            figures = (f"{ways[way][part][kind]:.2f}" for way in KERNELS for kind in ("median", "least"))
            table.add_row(name, part, *figures)
        table.add_section()
    Console().print(table)
    kept = {"environment": machine, "settings": vars(arguments), "milliseconds": found}
    (RESULTS / f"large_vocabulary_{machine['kernels']}.json").write_text(json.dumps(kept, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
