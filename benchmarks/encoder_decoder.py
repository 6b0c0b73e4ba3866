"""A trained model with an encoder, on a wide copy of it: plain decoding beside the bandwidth, and what drafts gain.

    python recipes/train_corrector.py FOLDER --minutes 27
    OMP_NUM_THREADS=2 python -m benchmarks.encoder_decoder FOLDER --out FILE      about 6 minutes on two cores

The copy computes what the trained model computes and reads many times the weights (outrider.widen). Sources are
held-out ones that the model corrects rightly under greedy decoding: elsewhere a model that was trained for a short time
loops, and loops are drafted too easily. Each way writes as many tokens as the right text has, one text at a time, and the
ways take turns. Only the time behind the first token counts, so that reading the source has no part in it. The figures are
medians of rounds with their ranges: a round is all texts of one way.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from benchmarks.hybrids import steps
from outrider import LLM, DraftModel, Ngram, SamplingParams, SpeculationConfig, Suffix
from outrider.lab.measure.decoding_config import DecodingConfig
from outrider.lab.measure.figures import Spread
from outrider.lab.measure.machine import LoadWatch, describe, read_bandwidth
from outrider.lab.measure.writing import EncodedTask, write
from outrider.model.memory import PassTimer
from outrider.widen import wide_copy

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
from corrections import corrections

_LENGTH, _SEED = 512, 2**20 + 7
#: Fewer tokens are too short a text to time.
_LEAST = 40
#: So many texts are tried for each one that is wanted.
_MOST_TRIED = 64
_TEMPERATURES = (0.0, 1.0)
_DRAFT_TOKENS = 4
#: Stands among the ways for reading as many bytes as a pass does.
_READING = "reading"


def ways(draft: str) -> dict[str, DecodingConfig]:
    """Who takes turns, by name."""
    drafted = SpeculationConfig(method=DraftModel(model=draft), num_draft_tokens=_DRAFT_TOKENS)
    ngram = SpeculationConfig(method=Ngram(), num_draft_tokens=8)
    suffix = SpeculationConfig(method=Suffix(), num_draft_tokens=8)
    chosen = SpeculationConfig.of({"method": "auto", "methods": [each.as_mapping() for each in (drafted, suffix)]})
    found = {"plain": SpeculationConfig(), "ngram, 8": ngram, "suffix, 8": suffix}
    found |= {f"draft_model, {_DRAFT_TOKENS}": drafted, "auto": chosen}
    return {name: DecodingConfig(name, config) for name, config in found.items()}


def tasks_of(target: str, count: int) -> tuple[list[EncodedTask], int]:
    """Sources that the model corrects rightly, with as many tokens as their texts have; and how many were tried."""
    with LLM(target, speculation="none") as llm:
        return _tasks_of(llm, count)


def _tasks_of(llm: LLM, count: int) -> tuple[list[EncodedTask], int]:
    drawn = (each for each in corrections(_SEED, lines=(3, 6)) if len(each.text) > 3 * _LEAST)
    found: list[EncodedTask] = []
    tried = 0
    while len(found) < count:
        if tried >= _MOST_TRIED * count:
            sys.exit(f"only {len(found)} of {tried} texts were corrected rightly: train the model for longer")
        some = list(itertools.islice(drawn, 16))
        outputs = llm.generate([each.source for each in some], SamplingParams(temperature=0, max_tokens=300))
        for each, output in zip(some, outputs, strict=True):
            tokens, tried = output.outputs[0].token_ids, tried + 1
            if output.outputs[0].text == each.text and len(tokens) >= _LEAST:
                found.append(EncodedTask(str(tried), tuple(output.prompt_token_ids), len(tokens) - 1))
    return found, tried


class Stock:
    """`generate` of transformers over the same copy, alone or with an assistant.

    Args:
        copy: The folder of the copy.
        draft: That of the assistant.
    """

    def __init__(self, copy: str, draft: str) -> None:
        self._model, self._draft = (_stock(folder) for folder in (copy, draft))
        self._draft.generation_config.update(
            num_assistant_tokens=_DRAFT_TOKENS, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
        )

    def speed(self, tasks: list[EncodedTask], temperature: float, *, assisted: bool) -> float:
        """Tokens a second behind the first one, whose time is measured apart."""
        seconds = tokens = 0.0
        for task in tasks:
            seconds += self._seconds(task, task.max_tokens, temperature, assisted) - self._seconds(
                task, 1, temperature, False
            )
            tokens += task.max_tokens - 1
        return tokens / seconds

    @torch.inference_mode()
    def _seconds(self, task: EncodedTask, max_tokens: int, temperature: float, assisted: bool) -> float:
        source = torch.tensor([task.prompt_ids])
        how: dict[str, Any] = {"do_sample": temperature > 0, "top_k": 0} if temperature else {"do_sample": False}
        if assisted:
            how["assistant_model"] = self._draft
        start = perf_counter()
        found = self._model.generate(source, max_new_tokens=max_tokens, **how)
        seconds = perf_counter() - start
        assert found.shape[1] == 1 + max_tokens, "no token ends a text"
        return seconds


def _stock(folder: str) -> Any:
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    model.config.num_layers = model.config.num_decoder_layers  # of its cache, which takes those of the encoder otherwise
    return model


def measure(folder: Path, rounds: int, count: int, *, stock: bool) -> dict[str, Any]:
    """All figures of a trained pair."""
    copy, draft = wide_copy(str(folder / "target"), "bfloat16"), str(folder / "draft")
    tasks, tried = tasks_of(str(folder / "target"), count)
    how: dict[str, Any] = {"speculation": "none", "prefix_caching": False, "max_num_seqs": 1, "max_model_len": _LENGTH}
    with LLM(copy, **how) as llm:
        runner, each = llm.engine.runner, ways(draft)
        num_bytes = runner.backend.weight_bytes(runner.loaded.model)
        assert num_bytes is not None, "the kernels compute the copy"
        peer = Stock(copy, draft) if stock else None
        passes, watch = steps(PassTimer(runner, _LENGTH), num_bytes, rounds), LoadWatch()
        found: dict[str, Any] = {}
        for temperature in _TEMPERATURES:
            turns = [_round(llm, tasks, each, temperature, peer, num_bytes) for _ in range(rounds + 1)][1:]
            found[str(temperature)] = _joined(turns)
            print(f"temperature {temperature} is done", file=sys.stderr, flush=True)
        return {
            "backend": runner.backend.name,
            "weight_bytes": num_bytes,
            "right": f"{len(tasks)} of {tried} that were tried",
            **passes,
            "load": str(watch.load()),
            "temperatures": found,
        }


def _round(
    llm: LLM,
    tasks: list[EncodedTask],
    each: dict[str, DecodingConfig],
    temperature: float,
    peer: Stock | None,
    num_bytes: int,
) -> dict[str, tuple[float, float]]:
    """Tokens a second, and tokens of a pass, by way; and how often a second the bytes of a pass can be read."""
    found = {_READING: (read_bandwidth(torch.device("cpu"), num_bytes, repeats=5) / num_bytes, 0.0)}
    for name, way in each.items():
        runs = [write(llm, [task], way, temperature) for task in tasks]
        assert all(run.drafts is not None and run.drafts.num_proposer_faults == 0 for run in runs), "a proposer has failed"
        speed = sum(run.decode_tokens for run in runs) / sum(run.decode_seconds or 0.0 for run in runs)
        found[name] = speed, median(run.tokens_per_pass or 0.0 for run in runs)
    if peer is not None:
        found["transformers"] = peer.speed(tasks, temperature, assisted=False), 1.0
        found["transformers, assisted"] = peer.speed(tasks, temperature, assisted=True), 0.0
    return found


def _joined(turns: list[dict[str, tuple[float, float]]]) -> dict[str, dict[str, Any]]:
    """The figures of all rounds, by way: the gain over plain decoding of the same round, and tokens of a pass."""
    found: dict[str, dict[str, Any]] = {}
    for name in (each for each in turns[0] if each != _READING):
        gains = Spread.of([turn[name][0] / turn["plain"][0] for turn in turns])
        assert gains is not None, "there is a round"
        found[name] = {"gain": gains.model_dump(), "tokens": median(turn[name][1] for turn in turns)}
        found[name]["tokens_per_second"] = median(turn[name][0] for turn in turns)
    found["plain"]["share_of_bandwidth"] = median(turn["plain"][0] / turn[_READING][0] for turn in turns)
    return found


def shown(found: dict[str, Any]) -> Table:
    """The figures as a table of Markdown."""
    table = Table("temperature", "way", "tokens/s", "tokens of a pass", "over plain decoding", box=MARKDOWN)
    for temperature, by_way in found["temperatures"].items():
        for name, each in by_way.items():
            gain = each["gain"]
            spread = f"{gain['median']:.2f} ({gain['low']:.2f} to {gain['high']:.2f})"
            tokens = f"{each['tokens']:.2f}" if each["tokens"] else ""
            table.add_row(temperature, name, f"{each['tokens_per_second']:.1f}", tokens, spread)
    return table


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description="Drafts for a wide copy of a trained model with an encoder.")
    parser.add_argument("folder", type=Path, help="of a pair by recipes/train_corrector.py")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--no-stock", action="store_true", help="leave transformers out")
    parser.add_argument("--out", type=Path, help="where the figures go as JSON")
    arguments = parser.parse_args()
    found = measure(arguments.folder, arguments.rounds, arguments.texts, stock=not arguments.no_stock)
    Console(width=140).print(shown(found))
    megabytes, share = found["weight_bytes"] / 1e6, found["share_of_bandwidth"]
    print(
        f"{megabytes:.0f} MB, T(1) {found['row_ms']:.1f} ms, a pass reads at {share:.0%} of the bandwidth; {found['load']}"
    )
    for temperature, by_way in found["temperatures"].items():
        print(f"temperature {temperature}: plain decoding is {by_way['plain']['share_of_bandwidth']:.0%} of the bandwidth")
    print(f"corrected rightly: {found['right']}")
    if arguments.out is not None:
        facts = {"environment": describe(torch.device("cpu")), "rounds": arguments.rounds}
        arguments.out.write_text(json.dumps({**facts, **found}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
