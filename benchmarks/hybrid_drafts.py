"""Drafts for a trained model with running states, on a wide copy of it: their gain beside what their parts cost.

    python recipes/train_hybrid.py FOLDER --minutes 24
    OMP_NUM_THREADS=2 python -m benchmarks.hybrid_drafts FOLDER --out FILE      about 4 minutes on two cores
    OMP_NUM_THREADS=2 python -m benchmarks.hybrid_drafts FOLDER --file          the copy as a file of llama.cpp (Q4_0)
    OMP_NUM_THREADS=2 python -m benchmarks.hybrid_drafts FOLDER --file --deep 4     with four times as many layers

The copy computes what the trained model computes and reads many times the weights (outrider.widen), so that a
pass waits for memory, as one of a larger model does. Its own layer that predicts several tokens, the embedded draft model
and the engine's choice (`auto`) between both take turns with plain decoding at temperature 1, one text at a time. Passes
are timed in every round, too, in the middle of such a text. A file of the copy carries the layer. It has no draft model,
and llama.cpp writes the same prompts with the same file in the same rounds, if the extra `llama-cpp` is installed.

The trained model has four layers, so the layer that predicts costs a quarter of a pass, and one of a published model costs
far less. A deep copy has more layers, which change nothing: it writes the same texts, and its passes cost what such layers
cost. The figures are medians of rounds with their ranges:

- tokens: what a pass of the target yields (tau).
- propose: the time of a draft over T(1), that of a plain pass. The first draft of a text is left out.
- C: the time T(n) of a pass with the draft's rows over T(1).
- gain: the speed over that of plain decoding in the same round. The time to the first token is left out.
- of expected: the gain over tau T(1) / (T_propose + T(n)), which it would be if nothing else took time. For plain
  decoding it is T(1) over the time of a token.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from benchmarks.governor import lower_bound
from benchmarks.heads import Clock
from benchmarks.hybrids import steps
from outrider import LLM, DraftModel, Mtp, SpeculationConfig
from outrider.config import default_model
from outrider.lab.convert.gguf import write_gguf
from outrider.lab.convert.gguf_vocabulary import placeholders
from outrider.lab.measure.decoding_config import DecodingConfig
from outrider.lab.measure.figures import Spread
from outrider.lab.measure.machine import LoadWatch, describe
from outrider.lab.measure.tasks import built_in
from outrider.lab.measure.writing import EncodedTask, encoded_tasks, write
from outrider.lab.peers.base import Peer, PeerModels
from outrider.lab.peers.llama_cpp import LlamaCppPeer
from outrider.loading.sources import WHOLE
from outrider.model.memory import PassTimer
from outrider.widen import wide_copy

_WORKLOAD, _LENGTH, _TEMPERATURE = "code_completion", 512, 1.0
#: Passes of each number of rows that are timed in a round.
_PASSES = 4
#: What drafts, with the lengths of its drafts, and what the engine chooses from.
_LENGTHS = {"mtp": (1, 2, 3), "draft_model": (3,)}
_OF_FILES = {"mtp": _LENGTHS["mtp"]}
_LONGEST = {"mtp": 4, "draft_model": 6}


def settings(method: str, length: int) -> SpeculationConfig:
    """Of a method that drafts so many tokens."""
    found = Mtp() if method == "mtp" else DraftModel(model=default_model("draft"))
    return SpeculationConfig(method=found, num_draft_tokens=length)


def ways(drafting: dict[str, tuple[int, ...]]) -> dict[str, DecodingConfig]:
    """Who takes turns, by name."""
    fixed = {f"{method}, {n}": settings(method, n) for method, lengths in drafting.items() for n in lengths}
    chosen = SpeculationConfig.of(
        {"method": "auto", "methods": [settings(name, _LONGEST[name]).as_mapping() for name in drafting]}
    )
    every = {"plain": SpeculationConfig(), **fixed, "auto": chosen}
    return {name: DecodingConfig(name, config) for name, config in every.items()}


class Stage:
    """The wide copy with everybody who drafts for it.

    Args:
        llm: The copy, loaded.
        tasks: What is written, a text a round.
        peer: Another engine that takes turns with them.
    """

    def __init__(self, llm: LLM, tasks: list[EncodedTask], peer: Peer | None = None, *, of_file: bool = False) -> None:
        self._lengths = _OF_FILES if of_file else _LENGTHS
        self._llm, self._tasks, self._ways, self._peer = llm, tasks, ways(self._lengths), peer
        self._clocks = [Clock(each) for name in self._lengths for each in llm.proposers.prepare(settings(name, 1))]
        self._timer = PassTimer(llm.engine.runner, _LENGTH)
        self.chosen: dict[str, int] = {}

    def round(self, turn: int) -> dict[str, dict[str, float]]:
        """The figures of one round, by way: those without a gain are of plain decoding."""
        task = self._tasks[turn % len(self._tasks)]
        seconds = self._passes(len(task.prompt_ids) + task.max_tokens // 2)
        names = list(self._ways) if turn % 2 else list(reversed(self._ways))
        written = {name: self._written(task, name) for name in names}
        plain = written["plain"]["speed"]
        found = {name: self._figures(name, figures, seconds, plain) for name, figures in written.items()}
        return found | (self._beside(self._peer, task, turn, plain) if self._peer else {})

    def _beside(self, peer: Peer, task: EncodedTask, turn: int, plain: float) -> dict[str, dict[str, float]]:
        """The figures of the other engine, without lookups."""
        found = {}
        for mode in peer.modes(full=False):
            if mode.kind != "ngram":
                how: dict[str, Any] = {"max_tokens": task.max_tokens, "temperature": _TEMPERATURE, "seed": turn}
                run = peer.generate(mode, [task.prompt_ids], **how)
                passes = run.num_tokens - (run.num_accepted_tokens or 0)
                gain = run.decode_tokens / (run.decode_seconds or 1.0) / plain
                found[f"{peer.name}, {mode.name}"] = {"tokens": run.num_tokens / passes, "gain": gain}
        return found

    def _passes(self, context: int) -> dict[int, float]:
        """Seconds of passes by their number of rows, which take turns."""
        rows = sorted({1, *(length + 1 for lengths in self._lengths.values() for length in lengths)})
        self._timer.compute(context)
        found: dict[int, list[float]] = {n: [] for n in rows}
        for _ in range(_PASSES):
            for n in rows:
                found[n].append(self._timer.seconds(context, n, logits=True))
        return {n: mean(each) for n, each in found.items()}

    def _written(self, task: EncodedTask, name: str) -> dict[str, float]:
        for clock in self._clocks:
            clock.seconds.clear()
        run = write(self._llm, [task], self._ways[name], _TEMPERATURE)
        assert run.drafts is not None, "our own runs are counted"
        assert run.drafts.num_proposer_faults == 0, "a proposer has failed"
        if name == "auto":
            for (method, length), count in self._llm.stats.chosen.items():
                self.chosen[f"{method} {length}"] = self.chosen.get(f"{method} {length}", 0) + count
        drafts = [seconds for clock in self._clocks for seconds in clock.seconds[1:]]
        return {
            "speed": run.tokens_per_second or 0.0,
            "tokens": run.tokens_per_pass or 0.0,
            "propose": mean(drafts) if drafts else 0.0,
        }

    def _figures(self, name: str, found: dict[str, float], seconds: dict[int, float], plain: float) -> dict[str, float]:
        figures = {"tokens": found["tokens"], "gain": found["speed"] / plain}
        if name == "auto":
            return figures
        if name == "plain":
            return {"tokens": found["tokens"], "of_expected": found["speed"] * seconds[1]}
        one, many = seconds[1], seconds[self._ways[name].config.num_draft_tokens + 1]
        expected = found["tokens"] * one / (found["propose"] + many)
        return figures | {"propose": found["propose"] / one, "C": many / one, "of_expected": figures["gain"] / expected}


def deepened(folder: str, out: Path, times: int) -> str:
    """Write a checkpoint with so many times as many layers. The added ones are copies of the others, but add nothing."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text("utf-8"))
    count, config["layer_types"] = config["num_hidden_layers"], config["layer_types"] * times
    config["num_hidden_layers"] = count * times
    (out / "config.json").write_text(json.dumps(config), "utf-8")
    tensors = load_file(out / WHOLE)
    for name, weight in list(tensors.items()):
        if name.startswith("model.layers."):
            number, _, rest = name.removeprefix("model.layers.").partition(".")
            adds = rest.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight"))
            for turn in range(1, times):
                tensors[f"model.layers.{int(number) + count * turn}.{rest}"] = weight * 0 if adds else weight.clone()
    save_file(tensors, out / WHOLE, {"format": "pt"})
    return str(out)


def measure(folder: str, rounds: int, max_tokens: int, *, of_file: bool, times: int) -> dict[str, Any]:
    """All figures of a trained checkpoint."""
    copy = wide_copy(folder, "bfloat16")
    tasks = encoded_tasks(copy, _LENGTH, {_WORKLOAD: built_in(_WORKLOAD)}, max_tokens)[_WORKLOAD]
    how: dict[str, Any] = {"speculation": "none", "prefix_caching": False, "max_num_seqs": 1, "max_model_len": _LENGTH}
    with ExitStack() as stack:
        peer, scratch = None, Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if times > 1:
            copy = deepened(copy, scratch / "deep", times)
        if of_file:
            copy = write_gguf(copy, scratch / "copy.gguf", "int4", placeholders(), "all")
            if LlamaCppPeer.missing() is None:
                models = PeerModels(copy, None, "int4", torch.get_num_threads(), scratch)
                peer = stack.enter_context(LlamaCppPeer(models))
        llm = stack.enter_context(LLM(copy, **how))
        runner = llm.engine.runner
        stage = Stage(llm, tasks, peer, of_file=of_file)
        num_bytes = runner.backend.weight_bytes(runner.loaded.model)
        assert num_bytes is not None, "the kernels compute the copy"
        passes, watch = steps(PassTimer(runner, _LENGTH), num_bytes, rounds), LoadWatch()
        found = []
        for turn in range(rounds + 1):
            figures = stage.round(turn)
            _tell(turn, rounds, figures)
            found += [figures] if turn else []  # the first round warms up
        return {
            "backend": runner.backend.name,
            "weight_bytes": num_bytes,
            **passes,
            "load": str(watch.load()),
            "ways": {name: _joined([each[name] for each in found]) for name in found[0]},
            "auto_at_least": lower_bound([each["auto"]["gain"] for each in found]),
            "chosen": stage.chosen,
        }


def _tell(turn: int, rounds: int, figures: dict[str, dict[str, float]]) -> None:
    """Print what a round has brought, since all of them take minutes."""
    gains = ", ".join(f"{name} {each['gain']:.2f}" for name, each in figures.items() if "gain" in each)
    print(f"round {turn} of {rounds}: {gains}", file=sys.stderr, flush=True)


def _joined(rounds: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    found = {name: Spread.of([each[name] for each in rounds]) for name in rounds[0]}
    return {name: spread.model_dump() for name, spread in found.items() if spread is not None}


def shown(found: dict[str, Any]) -> Table:
    """The figures as a table of Markdown."""
    columns = {"tokens": "tokens", "propose": "propose", "C": "C", "gain": "gain", "of_expected": "of expected"}
    table = Table("drafted by, tokens", *columns.values(), box=MARKDOWN)
    for name, figures in found["ways"].items():
        table.add_row(name, *(_spread(figures.get(column)) for column in columns))
    return table


def _spread(figures: dict[str, float] | None) -> str:
    return "" if figures is None else f"{figures['median']:.2f} ({figures['low']:.2f} to {figures['high']:.2f})"


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description="Drafts for a wide copy of a trained model with running states.")
    parser.add_argument("folder", help="of a checkpoint by recipes/train_hybrid.py")
    parser.add_argument("--file", action="store_true", help="write the copy as a file first")
    parser.add_argument("--deep", type=int, default=1, help="how many times as many layers the copy has")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, help="where the figures go as JSON")
    arguments = parser.parse_args()
    found = measure(arguments.folder, arguments.rounds, arguments.max_tokens, of_file=arguments.file, times=arguments.deep)
    Console(width=140).print(shown(found))
    megabytes, share = found["weight_bytes"] / 1e6, found["share_of_bandwidth"]
    print(f"{megabytes:.0f} MB, T(1) {found['row_ms']:.1f} ms, {share:.0%} of the bandwidth")
    print(f"auto at least {found['auto_at_least']:.3f} of plain; {found['load']}; chosen: {found['chosen']}")
    if arguments.out is not None:
        facts = {"environment": describe(torch.device("cpu")), "rounds": arguments.rounds}
        arguments.out.write_text(json.dumps({**facts, **found}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
