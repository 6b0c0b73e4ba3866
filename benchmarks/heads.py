"""Heads that read the target's features: what a level of a draft costs, and what they take from reading prompts.

    python -m benchmarks.heads      about 5 minutes on two cores
    python -m benchmarks.heads --layers 2 --tokens 200 --rounds 1 --hidden 256      a small trial

Targets and heads are random, in bfloat16: Llama layers, and heads of EAGLE-3 and DFlash with layers of the same shape. What
they cost does not depend on their weights, and their drafts do not stand. The figures are medians of rounds in which
everything takes turns:

- level: a draft of nine tokens less one of a single token, over eight, for one text; beside it the time in which the memory
  is read that a level reads (`bytes`: the layer and the output layer). DFlash drafts all its tokens in one pass, so its
  `level` is the whole block.
- draft over pass: a draft of five tokens over a plain pass of the target, by the target's depth. A deeper target pays for a
  draft more easily.
- deepened: a target to which layers were added that change nothing, so that its texts and the head's guesses stay the same.
  Its head is computed, and not trained: a draft of one token says what two steps of the target hold likeliest. The figures
  are how many tokens a pass yields, and the time of a plain token over that of one with the head, by depth.
- prompts: the time of a prompt without a head over that with one, for new prompts and for those whose first half is known.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from outrider import LLM, DFlash, Eagle3, SamplingParams, SpeculationConfig
from outrider.lab.measure.machine import describe, read_bandwidth
from outrider.lab.prove.tiny_heads import save_random_dflash, save_random_eagle
from outrider.model.memory import PassTimer
from outrider.propose.base import Proposer

_SHORT, _LONG = 1, 9
#: Length of the drafts that are held against a pass of the target.
_USUAL = 5
_VOCAB_SIZE, _DRAFTED = 32_000, 8_000
_CONTEXT = 64
#: Of a deepened target. It is no more than the hidden size, so that a head of one matrix can know all that follows.
_DEEPENED_VOCAB_SIZE = 256
_METHODS = {"eagle3": Eagle3, "dflash": DFlash}


def save_target(folder: Path, layers: int, hidden: int, vocab_size: int = _VOCAB_SIZE) -> str:
    """A random Llama; returns its folder."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, head_dim=64, max_position_embeddings=8192,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, dtype="bfloat16",
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.generation_config = GenerationConfig()  # so no token ends a text
    model.save_pretrained(folder)
    return str(folder)


def _head_shape(hidden: int) -> dict[str, int]:
    """The sizes of a head's layers, which are those of the target's."""
    return {
        "intermediate_size": 3 * hidden, "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128,
        "head_dim": 64,
    }  # fmt: skip


def save_heads(folder: Path, target: str, layers: int, hidden: int) -> dict[str, str]:
    """A head of each method, by its name."""
    shape = _head_shape(hidden)
    drafted, read = tuple(range(0, _VOCAB_SIZE, _VOCAB_SIZE // _DRAFTED)), [0, layers // 2, layers - 1]
    small: dict[str, Any] = {"scale": 0.02, "sizes": shape, "draft_tokens": drafted}
    named = {"eagle_aux_hidden_state_layer_ids": sorted(set(read))}
    return {
        "eagle3": save_random_eagle(folder / "eagle3", target, "speculators", **small, **named),
        "dflash": save_random_dflash(
            folder / "dflash", target, "speculators", block_size=_LONG + 1, inputs=tuple(sorted(set(read))), **small
        ),
    }


class Clock:
    """Times what a proposer does, and takes its place.

    Attributes:
        seconds: Of every draft, since it was emptied.
    """

    def __init__(self, proposer: Proposer) -> None:
        self.seconds: list[float] = []
        draft = proposer.propose

        def timed(requests: Any, noise: Any) -> Any:
            began = perf_counter()
            found = draft(requests, noise)
            self.seconds.append(perf_counter() - began)
            return found

        proposer.propose = timed  # type: ignore[method-assign]


def drafts(llm: LLM, heads: dict[str, str], rounds: int) -> dict[str, Any]:
    """Seconds of drafts of some lengths, of a plain pass, and of reading the memory that a level reads."""
    params, prompt = SamplingParams(temperature=0, max_tokens=24), list(range(1, _CONTEXT + 1))
    clocks, sizes = {}, {}
    for method, folder in heads.items():
        llm.generate(prompt, params.replace(max_tokens=2), speculation=_way(method, folder, _SHORT))
        proposer = llm.engine.proposers.get(_way(method, folder, _SHORT).method)
        clocks[method], sizes[method] = Clock(proposer), level_bytes(proposer)
    timer = PassTimer(llm.engine.runner, _CONTEXT + 1)
    timer.compute(_CONTEXT)
    found: dict[tuple[str, int], list[float]] = {}
    passes, reading = [], {method: [] for method in heads}
    for turn in range(rounds + 1):
        for method, folder in heads.items():
            for length in (_SHORT, _USUAL, _LONG):
                clocks[method].seconds.clear()
                llm.generate(prompt, params, speculation=_way(method, folder, length))
                seconds = median(clocks[method].seconds[1:])  # the first draft comes with the prompt's last pass
                found.setdefault((method, length), []).append(seconds)
            rate = read_bandwidth(torch.device("cpu"), max(sizes[method], 2**26), repeats=1)
            reading[method].append(sizes[method] / rate)
        passes.append(timer.seconds(_CONTEXT, 1, logits=True))
        if not turn:  # the first round warms up
            for each in (*found.values(), *reading.values(), passes):
                each.clear()
    pass_seconds = median(passes)
    return {"pass_ms": 1e3 * pass_seconds} | {
        method: {
            "bytes": sizes[method],
            "level_ms": 1e3 * _level(method, found),
            "reading_ms": 1e3 * median(reading[method]),
            "draft_over_pass": median(found[method, _USUAL]) / pass_seconds,
        }
        for method in heads
    }


def _level(method: str, found: dict[tuple[str, int], list[float]]) -> float:
    if method == "dflash":
        return median(found[method, _LONG])
    both = zip(found[method, _LONG], found[method, _SHORT], strict=True)
    return median((many - one) / (_LONG - _SHORT) for many, one in both)


def level_bytes(proposer: Any) -> int:
    """Of the weights that a level reads: all but what reads features, and tables."""
    network = proposer._head._placed.network
    named = ((name, weight) for name, weight in network.state_dict().items() if not name.startswith(("fc", "embed")))
    return sum(2 * weight.numel() for _, weight in named)


def prompts(llm: LLM, heads: dict[str, str], length: int, rounds: int) -> dict[str, dict[str, float]]:
    """The time of a prompt without a head over that with it: new prompts, and prompts of which the first half is known."""
    params = SamplingParams(temperature=0, max_tokens=1)
    ways = {"none": None} | {method: _way(method, folder, _USUAL) for method, folder in heads.items()}
    found: dict[str, dict[str, list[float]]] = {name: {"new": [], "known": []} for name in ways}
    for turn in range(rounds + 1):
        for place, (name, way) in enumerate(ways.items()):
            first = _text(length, len(ways) * turn + place)
            second = first[: length // 2] + _text(length - length // 2, -1 - place)
            for kind, prompt in (("new", first), ("known", second)):
                began = perf_counter()
                llm.generate(prompt, params, speculation="none" if way is None else way)
                if turn:  # the first round warms up
                    found[name][kind].append(perf_counter() - began)
    plain = found.pop("none")
    return {
        name: {
            kind: median(one / other for one, other in zip(plain[kind], seconds, strict=True))
            for kind, seconds in each.items()
        }
        for name, each in found.items()
    }


def _text(length: int, number: int, vocab_size: int = _VOCAB_SIZE) -> list[int]:
    """Tokens of a text that begins as no other one."""
    return [(7919 * place + 104_729 * number) % vocab_size for place in range(length)]


def _way(method: str, folder: str, length: int) -> SpeculationConfig:
    return SpeculationConfig(method=_METHODS[method](model=folder), num_draft_tokens=length)


def measure(layers: int, hidden: int, tokens: int, rounds: int, *, with_prompts: bool) -> dict[str, Any]:
    """All figures of a target."""
    with tempfile.TemporaryDirectory() as place:
        target = save_target(Path(place) / "target", layers, hidden)
        heads = save_heads(Path(place), target, layers, hidden)
        with LLM(target, dtype="bfloat16", speculation="none", kv_cache_tokens=4 * tokens + 512, max_num_seqs=2) as llm:
            found = {"drafts": drafts(llm, heads, rounds)}
            if with_prompts:
                found["prompts"] = prompts(llm, heads, tokens, rounds)
            return found


def save_deepened(folder: Path, layers: int, hidden: int) -> tuple[str, str]:
    """A target whose layers change nothing, and a head that knows what comes two tokens later; returns both."""
    from safetensors.torch import load_file, save_file

    target = Path(save_target(folder / "target", layers, hidden, _DEEPENED_VOCAB_SIZE))
    tensors = load_file(target / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    torch.manual_seed(1)  # so that all depths have the same texts
    tensors["lm_head.weight"] = (torch.randn(_DEEPENED_VOCAB_SIZE, hidden) * 8 / hidden**0.5).to(torch.bfloat16)
    tensors["model.embed_tokens.weight"] = torch.randn(_DEEPENED_VOCAB_SIZE, hidden).to(torch.bfloat16)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    rows = tensors["model.embed_tokens.weight"].double()
    normed = rows * (rows.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    probs = (normed @ tensors["lm_head.weight"].double().T).softmax(-1)
    shape = _head_shape(hidden)
    head = save_random_eagle(
        folder / "head", str(target), "speculators", sizes=shape, eagle_aux_hidden_state_layer_ids=[1], scale=0.0
    )
    weights = load_file(Path(head) / "model.safetensors")
    weights["fc.weight"] = torch.eye(hidden)
    weights["lm_head.weight"] = (torch.linalg.pinv(normed) @ (probs @ probs).clamp_min(1e-9).log()).T.float().contiguous()
    weights |= {name: torch.ones_like(weight) for name, weight in weights.items() if "norm" in name}
    save_file(weights, Path(head) / "model.safetensors")
    return str(target), head


def deepened(layers: int, hidden: int, rounds: int) -> dict[str, float]:
    """Tokens that a pass yields with the head, and the time of a plain token over that of one with it."""
    params = SamplingParams(temperature=0, max_tokens=64)
    with tempfile.TemporaryDirectory() as place:
        target, head = save_deepened(Path(place), layers, hidden)
        with LLM(target, dtype="bfloat16", speculation="none", kv_cache_tokens=1024, max_num_seqs=2) as llm:
            passes: list[float] = []
            gains: list[float] = []
            for turn in range(rounds + 1):
                prompt, seconds = _text(_CONTEXT, turn, _DEEPENED_VOCAB_SIZE), []
                for way in ("none", _way("eagle3", head, 1)):
                    began = perf_counter()
                    (output,) = llm.generate(prompt, params, speculation=way)
                    seconds.append((perf_counter() - began) / len(output.token_ids))
                if turn:  # the first round warms up
                    passes.append(len(output.token_ids) / output.stats.num_target_passes)
                    gains.append(seconds[0] / seconds[1])
            return {"tokens_per_pass": median(passes), "gain": median(gains)}


def shown_by_depth(found: dict[int, dict[str, float]]) -> Table:
    """The figures of a deepened target as a table of Markdown."""
    table = Table("layers, which change nothing", "tokens a pass", "plain time over that with eagle3", box=MARKDOWN)
    for layers, entry in found.items():
        table.add_row(str(layers), f"{entry['tokens_per_pass']:.2f}", f"{entry['gain']:.2f}")
    return table


def shown(found: dict[int, dict[str, Any]]) -> Table:
    """The figures as a table of Markdown."""
    table = Table(
        "layers", "pass, ms", "method", "MB", "level, ms", "reading, ms", "ratio", "draft over pass", "new prompts",
        "known", box=MARKDOWN,
    )  # fmt: skip
    for layers, entry in found.items():
        for method in _METHODS:
            one = entry["drafts"][method]
            read = entry.get("prompts", {}).get(method, {})
            table.add_row(
                str(layers), f"{entry['drafts']['pass_ms']:.2f}", method, f"{one['bytes'] / 1e6:.0f}",
                f"{one['level_ms']:.2f}", f"{one['reading_ms']:.2f}", f"{one['level_ms'] / one['reading_ms']:.2f}",
                f"{one['draft_over_pass']:.2f}", *(f"{read[kind]:.2f}" if read else "" for kind in ("new", "known")),
            )  # fmt: skip
    return table


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description="What heads that read the target's features cost.")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 16], help="depths of the target")
    parser.add_argument("--hidden", type=int, default=1024, help="a multiple of 128")
    parser.add_argument("--tokens", type=int, default=800, help="of a prompt")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path, help="where the figures go as JSON")
    arguments = parser.parse_args()
    found = {}
    for layers in arguments.layers:  # prompts are read beside the middle one alone
        middle = layers == sorted(arguments.layers)[len(arguments.layers) // 2]
        found[layers] = measure(layers, arguments.hidden, arguments.tokens, arguments.rounds, with_prompts=middle)
        Console(width=140).print(shown({layers: found[layers]}))
    by_depth = {layers: deepened(layers, arguments.hidden, arguments.rounds) for layers in arguments.layers}
    Console(width=140).print(shown_by_depth(by_depth))
    if arguments.out is not None:
        facts = {"environment": describe(torch.device("cpu")), "rounds": arguments.rounds}
        arguments.out.write_text(json.dumps({**facts, "targets": found, "deepened": by_depth}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
