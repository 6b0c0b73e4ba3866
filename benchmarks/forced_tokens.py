"""What tokens that a structure forces are worth: tokens a pass and speed, with a draft model behind them and without.

python -m benchmarks.forced_tokens --wide --out benchmarks/results/forced_tokens.json

Every text is written in five ways that take turns, from the same seed: plainly with a pass for each token (the engine then
drafts nothing that is forced), plainly, both with the draft model, and as the engine chooses. So all write the same text,
which is checked, and times can be compared text by text. With `--texts` several texts of one kind are written together. The
share f of forced tokens is counted apart: the finished text is led through its automaton once more. C is the time of a
target's pass in plain decoding with forced tokens over that of one with a row for each token. Seconds are those of whole
requests, prompts included. Tokens a pass are those behind a text's first token over the passes behind that of its prompt.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from outrider import LLM, SamplingParams, SpeculationConfig, StructuredOutputs
from outrider.config import default_model
from outrider.engine.drafting import planning
from outrider.results import FORCED
from outrider.server.tool_grammars import calls_grammar
from outrider.widen import wide_target

DRAFT = {"method": "draft_model", "num_draft_tokens": 3}
#: By name: whether forced tokens are drafted, and the method.
WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    "a pass a token": (False, {"method": "none"}),
    "none": (True, {"method": "none"}),
    "draft model alone": (False, DRAFT),
    "draft model": (True, DRAFT),
    "auto": (True, {"method": "auto", "methods": [{**DRAFT, "num_draft_tokens": 5}]}),
}


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


_WORD: dict[str, Any] = {"type": "string", "pattern": "^[a-z]{3,10}$"}
_WORDS: dict[str, Any] = {"type": "string", "pattern": "^[a-z]{2,8}( [a-z]{2,8}){1,4}$"}
_NUMBER: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 999}
#: What a program asks a model for: a record, a list of records, a decision, settings.
SCHEMAS = {
    "person": _object(first_name=_WORD, last_name=_WORD, age=_NUMBER, email_verified={"type": "boolean"}),
    "order": _object(
        order_id=_NUMBER,
        items={"type": "array", "minItems": 2, "maxItems": 3, "items": _object(product=_WORD, quantity=_NUMBER)},
        currency={"enum": ["EUR", "USD", "JPY"]},
    ),
    "review": _object(summary=_WORDS, sentiment={"enum": ["positive", "negative", "neutral"]}, confidence=_NUMBER),
    "settings": _object(
        log_level={"enum": ["debug", "info", "warning", "error"]}, max_connections=_NUMBER, retry=_object(limit=_NUMBER)
    ),
}
TOOLS = {
    "get_weather": _object(city=_WORD, unit={"enum": ["celsius", "fahrenheit"]}),
    "create_event": _object(title=_WORDS, duration_minutes=_NUMBER, repeat={"enum": ["never", "daily", "weekly"]}),
    "search_files": _object(query=_WORDS, folder=_WORD, max_results=_NUMBER),
}


def workloads() -> dict[str, list[tuple[str, StructuredOutputs]]]:
    """Prompts with their structures."""
    schemas = [(f"# A {name} as JSON:\n", StructuredOutputs(json_schema=schema)) for name, schema in SCHEMAS.items()]
    each = [
        (f"# Call {name}:\n", StructuredOutputs(grammar=calls_grammar("hermes", {name: schema}, several=False)))
        for name, schema in TOOLS.items()
    ]
    any_of = StructuredOutputs(grammar=calls_grammar("hermes", TOOLS, several=False))
    return {"JSON with a schema": schemas, "strict tool calls": [*each, ("# Call one of the functions:\n", any_of)]}


@dataclass(frozen=True)
class Text:
    """One text, or several that were written together.

    Attributes:
        token_ids: The whole of each.
        seconds: From the request to the last token.
        passes: Target passes, those of prompts included.
        gains: Passes in which a text gained tokens, summed over the texts.
        forward: Seconds of these.
        forced: Draft tokens that entered it and were forced.
    """

    token_ids: tuple[tuple[int, ...], ...]
    seconds: float
    passes: int
    gains: int
    forward: float
    forced: int


def write(llm: LLM, prompt: str, structure: StructuredOutputs, way: str, seed: int, num_texts: int) -> Text:
    forces, method = WAYS[way]
    before, planning.MOST_FORCED = planning.MOST_FORCED, planning.MOST_FORCED if forces else 0
    try:
        config, tokens = llm.resolve(SpeculationConfig.of(method)), llm.encode(prompt)
        requests = []
        for number in range(num_texts):
            params = SamplingParams(structured_outputs=structure, seed=seed + 100_000 * number, max_tokens=200)
            requests.append(llm.engine.add_request(tokens, params, config))
        begun, forward, passes = perf_counter(), 0.0, 0
        while not all(request.finished for request in requests):
            llm.engine.step()
            forward, passes = forward + llm.stats.step_seconds["forward"], passes + 1
        seconds, sequences = perf_counter() - begun, [request.sequences[0] for request in requests]
        gains = sum(seq.stats.num_target_passes for seq in sequences)
        forced = sum(seq.stats.accepted_by_method.get(FORCED, 0) for seq in sequences)
        return Text(tuple(tuple(seq.output_token_ids) for seq in sequences), seconds, passes, gains, forward, forced)
    finally:
        planning.MOST_FORCED = before


def forced_share(llm: LLM, token_ids: Sequence[int], structure: StructuredOutputs) -> tuple[int, int]:
    """Tokens behind the first that the structure left no choice for, and all tokens behind the first."""
    state, count = llm.engine.grammars.start(structure), 0
    for place, token in enumerate(token_ids):
        count += place > 0 and state.only(()) == token
        if place + 1 < len(token_ids):
            state.advance(token)
    return count, len(token_ids) - 1


def measured(llm: LLM, tasks: Sequence[tuple[str, StructuredOutputs]], rounds: int, num_texts: int) -> dict[str, Any]:
    """Figures of one workload."""
    found: dict[str, list[Text]] = {way: [] for way in WAYS}
    forced = all_tokens = 0
    for turn in range(rounds):
        for place, (prompt, structure) in enumerate(tasks):
            names = list(WAYS) if (turn + place) % 2 else list(reversed(WAYS))
            texts = {way: write(llm, prompt, structure, way, 1000 * turn + place, num_texts) for way in names}
            assert len({text.token_ids for text in texts.values()}) == 1, "the texts of a seed differ"
            for way, text in texts.items():
                found[way].append(text)
            for token_ids in texts["none"].token_ids:
                some, of = forced_share(llm, token_ids, structure)
                forced, all_tokens = forced + some, all_tokens + of
    f = forced / all_tokens
    passes = {way: sum(text.forward for text in texts) / sum(text.passes for text in texts) for way, texts in found.items()}
    c = passes["none"] / passes["a pass a token"]
    per_pass = {way: all_tokens / sum(text.gains - num_texts for text in texts) for way, texts in found.items()}
    return {
        "texts": len(found["none"]),
        "tokens": all_tokens,
        "f": f,
        "C": c,
        "tokens_a_pass": per_pass,
        "asked_tokens_a_pass": 0.95 / (1 - f),
        "speedup": {way: speedup(found["a pass a token"], found[way]) for way in WAYS if way != "a pass a token"},
        "asked_speedup": 0.85 / ((1 - f) * c),
        "draft_model_over_itself_alone": speedup(found["draft model alone"], found["draft model"]),
        "auto_over_none": speedup(found["none"], found["auto"]),
        "forced_accepted": sum(text.forced for text in found["none"]),
    }


def speedup(base: Sequence[Text], other: Sequence[Text]) -> dict[str, float]:
    """Times of the base over those of another way: of all texts together, and the median of pairs with its 95% range."""
    return speedup_of([text.seconds for text in base], [text.seconds for text in other])


def speedup_of(base: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """The same of seconds, text by text."""
    ratios = np.array(base) / np.array(other)
    rng = np.random.default_rng(0)
    medians = np.median(ratios[rng.integers(0, len(ratios), (4000, len(ratios)))], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return {"whole": sum(base) / sum(other), "median": median(ratios.tolist()), "low": float(low), "high": float(high)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--texts", type=int, default=1)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    target = wide_target(asked.dtype) if asked.wide else default_model("target")
    draft = SpeculationConfig.of({**DRAFT, "model": default_model("draft")})
    llm = LLM(target, dtype=asked.dtype, speculation=draft, prefix_caching=False)
    found: dict[str, Any] = {
        "load": os.getloadavg(),
        "wide": asked.wide,
        "dtype": asked.dtype,
        "texts_at_a_time": asked.texts,
    }
    for name, tasks in workloads().items():
        for prompt, structure in tasks:
            for way in ("draft model", "auto"):
                write(llm, prompt, structure, way, 7, asked.texts)  # warm
        found[name] = measured(llm, tasks, asked.rounds, asked.texts)
    found["load_after"] = os.getloadavg()
    text = json.dumps(found, indent=1)
    print(text)
    if asked.out is not None:
        asked.out.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
