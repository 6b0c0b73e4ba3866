"""Drives an engine step by step on a GPU: wall times, phases, and what PyTorch's profiler sees of a few steps."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, Self

import torch
from torch.autograd import DeviceType

from benchmarks.gpu.timing import synchronise
from outrider import LLM, SamplingParams, SpeculationConfig

#: Kernels by a part of their names, the first that fits.
FAMILIES = (
    ("attention (Triton)", r"^_find|^_fold"),
    ("KV write (Triton)", r"^_write$"),
    ("probabilities (Triton)", r"^_target_probs|^_largest|^_kth_largest|^_nucleus|^_write_"),
    ("draws (Triton)", r"^_race|^_invert|^_debt"),
    ("copies between host and device", r"^Memcpy (HtoD|DtoH)"),
    ("copies on the device", r"^Memcpy|^Memset"),
    ("products", r"gemm|gemv|nvjet|cutlass|cublas|splitK|xmma"),
    ("attention (PyTorch)", r"flash|fmha|sdpa|attention"),
    ("sums and maxima", r"reduce|softmax|sort|topk"),
    ("gathers", r"index|gather|scatter|embedding"),
    ("concatenation", r"Cat"),
    ("elementwise", r"elementwise"),
)
#: Calls in which the host waits for the device.
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")


class Texts:
    """Texts that an engine writes while its thread rests, from behind their prompts on."""

    def __init__(
        self, llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams, config: SpeculationConfig
    ) -> None:
        self._engine = llm.engine
        self._engine.load_method(config)
        self._device = self._engine.runner.loaded.device
        self._requests = [self._engine.add_request(tuple(prompt), params, config) for prompt in prompts]
        self._sequences = [request.sequences[0] for request in self._requests]
        while not all(seq.num_output_tokens for seq in self._sequences):
            self.step()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for request in self._requests:
            self._engine.cancel(request)

    @property
    def num_tokens(self) -> int:
        return sum(seq.num_output_tokens for seq in self._sequences)

    def step(self) -> None:
        self._engine.step()
        for request in self._requests:
            if request.error is not None:
                raise request.error

    def run(self, tokens: int) -> dict[str, Any]:
        """Write so many tokens more, or a few above that. Returns the steps, the tokens, and the wall time of each step."""
        first, spans = self.num_tokens, []
        synchronise(self._device)
        while self.num_tokens < first + tokens:
            begin = time.perf_counter()
            self.step()
            spans.append(1000 * (time.perf_counter() - begin))
        return {"steps": len(spans), "tokens": self.num_tokens - first, "spans": spans}

    def phases(self, steps: int, *, waiting: bool) -> dict[str, float]:
        """Milliseconds of the phases of a step, as means. With `waiting` each phase ends when the device has done its work;
        without, `forward` is the time to enqueue a pass, and whoever reads its results first waits for it."""
        stats = self._engine.stats
        plain, sums = stats.timed, Counter[str]()

        @contextmanager
        def timed(phase: str) -> Iterator[None]:
            with plain(phase):
                yield
                synchronise(self._device)

        if waiting:
            stats.timed = timed  # type: ignore[method-assign]
        try:
            for _ in range(steps):
                begin = time.perf_counter()
                self.step()
                sums["wall"] += time.perf_counter() - begin
                sums.update(stats.step_seconds)
        finally:
            if waiting:
                del stats.timed  # type: ignore[attr-defined]
        return {phase: round(1000 * seconds / steps, 3) for phase, seconds in sums.items()}


def in_short(run: dict[str, Any]) -> dict[str, Any]:
    """Figures of a run."""
    spans = run["spans"]
    return {
        "steps": run["steps"],
        "tokens": run["tokens"],
        "ms_a_step": round(median(spans), 3),
        "slowest_ms": round(max(spans), 3),
        "tokens_a_second": round(1000 * run["tokens"] / sum(spans), 1),
    }


def profiled(work: Callable[[], Any], steps: int, device: torch.device) -> dict[str, Any]:
    """What a step asks of the device, and how long each family of kernels takes, as means over some steps.

    The profiler slows the host down, not the device: its kernels' times are right, and the wall time is not.
    """
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    synchronise(device)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        for _ in range(steps):
            work()
    calls, copies, launched = Counter[str](), Counter[str](), 0
    families, kernels = Counter[str](), Counter[str]()
    for event in found.events():
        if event.device_type == DeviceType.CPU and (not on_gpu or re.match(r"cu(da)?[A-Z]", event.name)):
            calls[event.name] += 1
        elif event.device_type != DeviceType.CPU:
            milliseconds = event.time_range.elapsed_us() / 1000
            families[family(event.name)] += milliseconds
            kernels[event.name[:100]] += milliseconds
            if event.name.startswith(("Memcpy", "Memset")):
                copies[event.name] += 1
            else:
                launched += 1
    return {
        "steps": steps,
        "waits": sum(calls[name] for name in WAITS) / steps,
        "copies": {name: count / steps for name, count in copies.most_common()},
        "kernels": launched / steps,
        "device_ms": round(sum(families.values()) / steps, 3),
        "families_ms": {name: round(ms / steps, 4) for name, ms in families.most_common(12)},
        "kernels_ms": {name: round(ms / steps, 4) for name, ms in kernels.most_common(12)},
        "calls": {name: count / steps for name, count in calls.most_common(12)},
    }


def family(name: str) -> str:
    return next((kind for kind, part in FAMILIES if re.search(part, name)), "others")
