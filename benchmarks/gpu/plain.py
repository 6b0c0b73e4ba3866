"""Plain decoding of a model in the shape of an 8B: a token's time, its parts, and transformers beside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.record import Record
from benchmarks.gpu.stepping import Texts, in_short, profiled
from benchmarks.gpu.timing import first_seconds, milliseconds, synchronise
from outrider import LLM, SamplingParams
from outrider.propose.settings import PLAIN

#: The shape of Llama 3.1 8B, and one for a rehearsal on a CPU.
SHAPE = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128_256}
SHAPE |= {"num_attention_heads": 32, "num_key_value_heads": 8}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 700}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
GREEDY = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
WAYS = {
    "greedy": GREEDY,
    "temperature": SamplingParams(temperature=0.8, max_tokens=400, ignore_eos=True),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9, max_tokens=400, ignore_eos=True),
}


def context(device: torch.device) -> int:
    return 1024 if device.type == "cuda" else 24


def tokens(device: torch.device) -> int:
    return 48 if device.type == "cuda" else 3


def plain(record: Record, device: torch.device) -> None:
    record.step("bandwidth", lambda: bandwidth(device))
    model = record.step_of("model", lambda: made(device), about)
    for batch in (1, 16):
        record.step(f"transformers, dynamic cache, batch {batch}", lambda batch=batch: theirs(model, batch, device))
    llm = record.step_of("load", lambda: loaded(model, device), backend)
    for batch in (1, 16):
        record.step(f"batch {batch}, greedy", lambda batch=batch: ours(llm, batch, GREEDY, device))
        record.step(f"batch {batch}, profile", lambda batch=batch: seen(llm, batch, GREEDY, device))
        record.step(f"batch {batch}, phases", lambda batch=batch: phases(llm, batch, GREEDY, device))
    for way in ("temperature", "top_p"):
        record.step(f"batch 1, {way}", lambda way=way: ours(llm, 1, WAYS[way], device))
    record.step("batch 1, top_p, profile", lambda: seen(llm, 1, WAYS["top_p"], device))
    llm.engine.runner.graphs.on = False
    for batch in (1, 16):
        record.step(f"batch {batch}, greedy, kernels one by one", lambda batch=batch: ours(llm, batch, GREEDY, device))


def bandwidth(device: torch.device) -> dict[str, float]:
    """Bytes a second of a copy on the device, counting those read and those written."""
    size = 4 * 2**30 if device.type == "cuda" else 2**20
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    spent = milliseconds(lambda: target.copy_(source), device, 10)
    return {"bytes": size, "ms": spent, "gb_a_second": round(2 * size / spent / 1e6, 1)}


def made(device: torch.device) -> Any:
    """Random weights, made on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = SHAPE if device.type == "cuda" else SMALL
    config = LlamaConfig(**shape, max_position_embeddings=8192, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)


def about(model: Any) -> dict[str, Any]:
    """Sizes. A step reads every weight but the embeddings, of which it takes a row a text."""
    count = sum(each.numel() for each in model.parameters())
    read = count - model.get_input_embeddings().weight.numel() * (not model.config.tie_word_embeddings)
    return {"parameters": count, "bytes_read_by_a_step": read * model.dtype.itemsize, "dtype": str(model.dtype)}


def loaded(model: Any, device: torch.device) -> LLM:
    room = 16 * (context(device) + 512)
    return LLM(model, consume=True, speculation="none", kv_cache_tokens=room, prefix_caching=False)


def backend(llm: LLM) -> str:
    return llm.engine.runner.backend.name


def prompts(batch: int, size: int, device: torch.device) -> torch.Tensor:
    torch.manual_seed(batch)
    return torch.randint(0, size, (batch, context(device)))


def ours(llm: LLM, batch: int, params: SamplingParams, device: torch.device) -> dict[str, Any]:
    """Steps behind prompts, and how long the first steps took, kernels compiled there included."""
    (texts, seconds) = first_seconds(lambda: started(llm, batch, params, device), device)
    with texts:
        begin = time.perf_counter()
        texts.run(2 * batch)
        first = time.perf_counter() - begin
        run = texts.run(tokens(device) * batch)
    return in_short(run) | {"seconds_of_prompts": seconds, "seconds_of_first_steps": round(first, 3)}


def started(llm: LLM, batch: int, params: SamplingParams, device: torch.device) -> Texts:
    size = llm.engine.runner.loaded.vocab_size
    return Texts(llm, prompts(batch, size, device).tolist(), params, PLAIN)


def seen(llm: LLM, batch: int, params: SamplingParams, device: torch.device) -> dict[str, Any]:
    with started(llm, batch, params, device) as texts:
        texts.run(2 * batch)
        return profiled(texts.step, 3, device)


def phases(llm: LLM, batch: int, params: SamplingParams, device: torch.device) -> dict[str, Any]:
    with started(llm, batch, params, device) as texts:
        texts.run(2 * batch)
        return {"as_it_is": texts.phases(10, waiting=False), "synchronised": texts.phases(10, waiting=True)}


def theirs(model: Any, batch: int, device: torch.device, **how: Any) -> dict[str, Any]:
    """`generate` of transformers: the time of many tokens less that of one, in three turns."""
    ids = prompts(batch, model.config.vocab_size, device).to(device)
    count = tokens(device)

    def seconds(length: int) -> float:
        given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": length, "do_sample": False}
        out, spent = first_seconds(lambda: model.generate(ids, pad_token_id=0, **given, **how), device)
        assert out.shape[1] == ids.shape[1] + length
        return spent

    first = seconds(1 + count)  # the longest first: a cache of fixed size is kept for shorter texts
    turns = [1000 * (seconds(1 + count) - seconds(1)) / count for _ in range(3)]
    return {"ms_a_step": round(median(turns), 3), "turns": [round(turn, 3) for turn in turns], "first_seconds": first}


def static(record: Record, device: torch.device) -> None:
    """The stock model with a cache of fixed size: as one CUDA graph, and compiled by `generate`."""
    model = record.step_of("model", lambda: made(device), about)
    for batch in (1, 16):
        record.step(f"one CUDA graph, batch {batch}", lambda batch=batch: as_graph(model, batch, device))
    record.step("generate, compiled, batch 1", lambda: theirs(model, 1, device, cache_implementation="static"))


@torch.inference_mode()
def as_graph(model: Any, batch: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds of the stock layers in one launch: a pass of one row a text, over the whole cache."""
    from transformers import StaticCache

    ids = prompts(batch, model.config.vocab_size, device).to(device)
    cache = StaticCache(config=model.config, max_cache_len=context(device) + 64)
    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    token, place = ids[:, -1:].clone(), torch.full((batch, 1), context(device), device=device)

    def work() -> Any:
        return model(token, past_key_values=cache, use_cache=True, position_ids=place).logits

    for _ in range(3):
        work()
    found = {"eager_ms": milliseconds(work, device, 10)}
    if device.type == "cuda":
        found["graph_ms"] = milliseconds(graph_of(work), device, 20)
    return found


def graph_of(work: Callable[[], Any]) -> Callable[[], None]:
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        work()
    torch.cuda.current_stream().wait_stream(beside)
    synchronise(torch.device("cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay
