"""The same head of EAGLE-3 here and in llama.cpp: how many of its draft tokens stand.

    python -m benchmarks.head_in_llama_cpp model.gguf HEAD DATA --limit 39 --out FILE

Both engines write greedy texts behind the held-out prompts of a folder of training data, one text at a time. Each rounds in
its own way, so texts part where two tokens are nearly equally likely. They also part where the text would end: this engine
writes the end and goes on, and llama.cpp forbids the end. What stands is compared over the texts in which both engines
wrote the same tokens, and beside it over all texts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from outrider import LLM, Eagle3, SamplingParams, SpeculationConfig
from outrider.lab.measure.machine import describe
from outrider.lab.peers.base import Peer, PeerModels
from outrider.lab.peers.known import open_peer
from outrider.records import read_manifest, read_records
from outrider.widen import cache_folder

#: What is counted of a text: its draft tokens, those that stood, and its tokens.
_COUNTED = ("drafted", "stood", "tokens")


def prompts_of(data: Path, limit: int) -> list[list[int]]:
    """The held-out prompts of a folder of training data."""
    manifest = read_manifest(data)
    held_out = (record for record in read_records(data, manifest) if record.held_out)
    return [record.token_ids[: record.num_prompt_tokens].tolist() for record in held_out][:limit]


def ours(llm: LLM, head: str, prompt: list[int], tokens: int, length: int) -> tuple[tuple[int, ...], dict[str, int]]:
    """The text of this engine, and what is counted of it."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    how = SpeculationConfig(method=Eagle3(model=head), num_draft_tokens=length)
    (output,) = llm.generate([prompt], params, speculation=how)
    stats = output.stats
    counted = (stats.num_draft_tokens, stats.num_accepted_tokens, len(output.token_ids))
    return tuple(output.token_ids), dict(zip(_COUNTED, counted, strict=True))


def theirs(peer: Peer, prompt: list[int], tokens: int, length: int) -> tuple[tuple[int, ...], dict[str, int]]:
    """The same of llama.cpp."""
    mode = next(mode for mode in peer.modes(full=False) if (mode.kind, mode.num_draft_tokens) == ("eagle3", length))
    run = peer.generate(mode, [prompt], max_tokens=tokens, temperature=0.0, seed=None)
    counted = (run.num_draft_tokens or 0, run.num_accepted_tokens or 0, run.num_tokens)
    return run.texts[0], dict(zip(_COUNTED, counted, strict=True))


def added(pairs: list[tuple[dict[str, int], dict[str, int]]]) -> dict[str, Any]:
    """The counts of texts, added up, for each engine."""
    sides = zip(("here", "llama.cpp"), zip(*pairs, strict=True), strict=False)
    sums = {who: {name: sum(each[name] for each in side) for name in _COUNTED} for who, side in sides}
    return {"texts": len(pairs), **sums}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", help="GGUF file of the target")
    parser.add_argument("head", help="folder or GGUF file of a head of EAGLE-3 for it")
    parser.add_argument("data", type=Path, help="folder of training data with held-out prompts")
    parser.add_argument("--limit", type=int, default=40, help="most prompts")
    parser.add_argument("--tokens", type=int, default=96, help="of each text")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 3], help="draft tokens, 1 to 3")
    parser.add_argument("--out", type=Path, help="file for the figures")
    asked = parser.parse_args()
    models = PeerModels(asked.target, None, "bfloat16", torch.get_num_threads(), cache_folder() / "peers", asked.head)
    found: dict[str, Any] = {"machine": describe(torch.device("cpu")), "target": Path(asked.target).name}
    with LLM(asked.target, speculation="none") as llm, open_peer("llama.cpp", models) as peer:
        for length in asked.lengths:
            texts = [
                (
                    ours(llm, asked.head, prompt, asked.tokens, length),
                    theirs(peer, prompt, asked.tokens, length),
                )
                for prompt in prompts_of(asked.data, asked.limit)
            ]
            pairs = [(here[1], there[1]) for here, there in texts]
            equal = [(here[1], there[1]) for here, there in texts if here[0] == there[0]]
            found[f"drafts of {length}"] = {"equal texts": added(equal), "all texts": added(pairs)}
    print(json.dumps(found, indent=1))
    if asked.out is not None:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
