"""Families of models at one size: what a pass costs beside its bytes, and how fast texts are written beside transformers.

    python -m benchmarks.families                 all families, half a minute each; writes benchmarks/results/
    python -m benchmarks.families gemma2 gpt2     measures these anew, and keeps the figures of the others

Every model is random, in bfloat16, with a hidden size of 1,024, 12 to 16 layers and 32,000 tokens. Its weights are about
0.22 billion numbers, which is far more than any cache holds. The figures are:

- the least time of a pass of one row behind 128 and 1,000 tokens, and the median of that of four rows over that of one
  within a round;
- the time of reading the weights of a row over that of a pass, since a pass cannot be faster. Of experts these
  are the ones that the row has;
- tokens a second behind the first token, and the time to the first token, ours and those of `generate` of transformers.
  These three are medians of rounds in which both sides take turns.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from outrider import LLM, SamplingParams
from outrider.lab.measure.machine import describe, read_bandwidth
from outrider.model.batch import Segment
from outrider.model.memory import weight_bytes
from outrider.model.runner import ModelRunner

RESULTS = Path(__file__).parent / "results" / "families.json"
CONTEXTS = (128, 1000)
ROWS = (1, 4)
NEW_TOKENS = 24
_NO_ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_SIZES: dict[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, **_NO_ENDS,
}  # fmt: skip
#: Feed-forwards without a gate have a third fewer weights.
_PLAIN: dict[str, Any] = {"num_hidden_layers": 15}
_HEADS: dict[str, Any] = {"head_dim": 64}
_WINDOWS: dict[str, Any] = {**_HEADS, "sliding_window": 512, "query_pre_attn_scalar": 64}
_EXPERTS: dict[str, Any] = {"num_experts": 32, "num_experts_per_tok": 8, "norm_topk_prob": True}
#: The configurations by name: their class, and what differs from the sizes above.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", _HEADS),
    "gemma": ("GemmaConfig", _HEADS),
    "gemma2": ("Gemma2Config", _WINDOWS),
    "gemma3": ("Gemma3TextConfig", _WINDOWS),
    "olmo": ("OlmoConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {"sliding_window": 512}),
    "gpt2": ("GPT2Config", _PLAIN),
    "gpt_neox": ("GPTNeoXConfig", _PLAIN),
    "phi": ("PhiConfig", _PLAIN),
    "opt": ("OPTConfig", {**_PLAIN, "ffn_dim": 4096, "word_embed_proj_dim": 1024}),
    "starcoder2": ("Starcoder2Config", {**_PLAIN, "sliding_window": None}),
    "stablelm": ("StableLmConfig", {}),
    "cohere": ("CohereConfig", {}),
    "cohere2": ("Cohere2Config", {"sliding_window": 512}),
    "granite": ("GraniteConfig", {}),
    "glm": ("GlmConfig", _HEADS),
    "glm4": ("Glm4Config", _HEADS),
    "smollm3": ("SmolLM3Config", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 512}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_HEADS, **_EXPERTS, "moe_intermediate_size": 128}),
    "olmoe": ("OlmoeConfig", {**_EXPERTS, "intermediate_size": 128}),
    "gpt_oss": (
        "GptOssConfig",
        {**_HEADS, "num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 128, "sliding_window": 512},
    ),
}


def random_model(name: str) -> Any:
    """A model of the family with random weights."""
    import transformers

    kind, differing = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**_SIZES, **differing})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config = transformers.GenerationConfig()  # so no token ends a text
    return model


class Passes(NamedTuple):
    """What passes take.

    Attributes:
        ms: The least milliseconds of a pass, by its context and its number of rows.
        ratios: C(4) by context: the median over rounds of the time of four rows over that of one.
        shares: For each round, the time of reading as many bytes as a pass has weights over that of a pass of one row
            behind the shorter context; nothing where the bytes are not known.
    """

    ms: dict[int, dict[int, float]]
    ratios: dict[int, float]
    shares: list[float]


def passes(runner: ModelRunner, num_bytes: int | None, rounds: int) -> Passes:
    """Times of passes and of reading, in turns: what memory gives drifts."""
    table = runner.blocks.allocate(runner.blocks.blocks_for(max(CONTEXTS) + max(ROWS)))
    tokens = _tokens(max(CONTEXTS) + max(ROWS))
    runner.forward([Segment(tokens[: max(CONTEXTS)], 0, table)])
    found: dict[int, dict[int, float]] = {context: dict.fromkeys(ROWS, float("inf")) for context in CONTEXTS}
    shares, ratios = [], dict[int, list[float]]()
    for _ in range(rounds):
        spent: dict[tuple[int, int], float] = {}
        for context in CONTEXTS:
            for rows in ROWS:
                segment = Segment(tokens[context : context + rows], context, table)
                spent[context, rows] = _timed(partial(runner.forward, [segment]))
                found[context][rows] = min(found[context][rows], 1e3 * spent[context, rows])
            ratios.setdefault(context, []).append(spent[context, ROWS[-1]] / spent[context, ROWS[0]])
        if num_bytes is not None:
            reading = num_bytes / read_bandwidth(torch.device("cpu"), num_bytes, repeats=1)
            shares.append(reading / spent[CONTEXTS[0], 1])
    runner.blocks.free(table)
    return Passes(found, {context: median(each) for context, each in ratios.items()}, shares)


def _tokens(count: int) -> list[int]:
    """Tokens that differ, as the rows of a text do: equal ones would share their experts."""
    return [(37 * i + 11) % _SIZES["vocab_size"] for i in range(count)]


def writing(llm: LLM, model: Any, rounds: int) -> dict[str, dict[int, dict[str, float]]]:
    """Tokens a second behind the first token and milliseconds to it, by engine and length of the prompt."""
    engines = {"outrider": partial(_ours, llm), "transformers": partial(_theirs, model)}
    found: dict[str, dict[int, dict[str, float]]] = {name: {} for name in engines}
    for context in CONTEXTS:
        prompt = _tokens(context)
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
        for turn in range(rounds + 1):
            for name, write in engines.items():
                start = perf_counter()
                times = write(prompt)
                if turn:  # the first round warms up
                    runs[name].append((times[0] - start, times[-1] - times[0]))
        for name, spent in runs.items():
            rate = NEW_TOKENS / median(rest for _, rest in spent)
            found[name][context] = {"tokens_per_second": rate, "first_token_ms": 1e3 * median(first for first, _ in spent)}
    return found


def _ours(llm: LLM, prompt: list[int]) -> list[float]:
    """When the tokens came."""
    params = SamplingParams(temperature=0, max_tokens=1 + NEW_TOKENS, ignore_eos=True)
    return [perf_counter() for _ in llm.stream(prompt, params)]


@torch.inference_mode()
def _theirs(model: Any, prompt: list[int]) -> list[float]:
    """When the tokens came."""
    clock, ids = _Clock(), torch.tensor([prompt])
    settings = {"max_new_tokens": 1 + NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    model.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **settings)
    return clock.times[1:]  # what comes first is the prompt


class _Clock:
    """A streamer that keeps the times at which something came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Any) -> None:
        """Called with the prompt, and then with each token."""
        self.times.append(perf_counter())

    def end(self) -> None:
        """Called at the end."""


def _timed(work: Callable[[], Any]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def measure(name: str, rounds: int) -> dict[str, Any]:
    """All figures of a family."""
    model = random_model(name)
    llm = LLM(model, speculation="none", prefix_caching=False, kv_cache_tokens=4096)
    runner = llm.engine.runner
    num_bytes = runner.backend.weight_bytes(runner.loaded.model) or weight_bytes(model)
    spent = passes(runner, num_bytes, 6 * rounds)
    return {
        "backend": runner.backend.name,
        "weight_bytes": num_bytes,
        "pass_ms": spent.ms,
        "four_rows_over_one": spent.ratios,
        "share_of_bandwidth": median(spent.shares) if spent.shares else None,
        "writing": writing(llm, model, rounds),
    }


def shown(found: dict[str, Any]) -> Table:
    """The figures as a table of Markdown. Where there are two, the second is behind 1,000 tokens."""
    names = ("family", "backend", "MB", "T(1), ms", "of bandwidth", "behind 1,000", "C(4)", "tokens/s", "transformers")
    table = Table(*names, box=MARKDOWN)
    for name, entry in found.items():
        near, far = (list(each.values()) for each in entry["pass_ms"].values())
        share, num_bytes = entry["share_of_bandwidth"], entry["weight_bytes"]
        rates = [
            " / ".join(f"{each['tokens_per_second']:.0f}" for each in entry["writing"][engine].values())
            for engine in ("outrider", "transformers")
        ]
        table.add_row(
            name,
            entry["backend"],
            "" if num_bytes is None else f"{num_bytes / 1e6:.0f}",
            f"{near[0]:.1f}",
            "" if share is None else f"{share:.0%}",
            f"{far[0]:.1f}",
            " / ".join(f"{ratio:.2f}" for ratio in entry["four_rows_over_one"].values()),
            *rates,
        )
    return table


def main() -> None:
    """Measure, print the figures, and write them to a file."""
    parser = argparse.ArgumentParser(description="Passes and texts of families of models at one size.")
    parser.add_argument("family", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    kept = json.loads(arguments.out.read_text("utf-8"))["families"] if arguments.out.exists() else {}
    for name in arguments.family or FAMILIES:
        kept[name] = json.loads(json.dumps(measure(name, arguments.rounds)))
        Console().print(shown({name: kept[name]}))
        ordered = {family: kept[family] for family in FAMILIES if family in kept}
        facts = {"environment": describe(torch.device("cpu")), "rounds": arguments.rounds, "new_tokens": NEW_TOKENS}
        arguments.out.write_text(json.dumps({**facts, "families": ordered}, indent=1) + "\n", "utf-8")
    Console().print(shown(ordered))


if __name__ == "__main__":
    main()
