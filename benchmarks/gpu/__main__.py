"""Checks the engine on a GPU of NVIDIA. It needs no download; PyTorch, Triton and transformers are enough.

    python -m benchmarks.gpu smoke    kernels beside float64, bits of chains and trees, small engines, the kernels' tests
    python -m benchmarks.gpu plain    a random model in the shape of an 8B, beside transformers: times, kernels, waits
    python -m benchmarks.gpu chain    chains of a draft model beside plain decoding, on wide copies of the embedded pair
    python -m benchmarks.gpu cuts     probabilities over 128,256 tokens, with other numbers of entries and of warps

A stage takes four minutes at most on an H100. Its parts are processes of their own, so that a fault in one leaves the
others alone. Each part writes to a file after every step, and all of them go into `--out` at the end. `--device cpu` tries
the same at small sizes without a GPU, where TRITON_INTERPRET=1 and OUTRIDER_KERNELS=triton let Triton interpret the
kernels; that says nothing about speed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

#: The parts of each stage: modules, functions, and the seconds after which no step begins.
STAGES: dict[str, list[tuple[str, str, int]]] = {
    "smoke": [
        ("kernels", "attention", 190),
        ("kernels", "rows", 190),
        ("bits", "bits", 190),
        ("engines", "engines", 190),
        ("kernel_tests", "kernel_tests", 190),
    ],
    "plain": [("plain", "plain", 80), ("plain", "static", 60)],
    "chain": [("chain", "chain", 165)],
    "cuts": [("kernels", "cuts", 165)],
}
#: Stages that measure times: their parts run one after the other, those of others side by side.
TIMED = ("plain", "chain", "cuts")
#: Seconds in which the last step of a part must end.
GRACE = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--out", type=Path, help="the file for the results; results/gpu/STAGE.json without it")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a rehearsal")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    given = parser.parse_args()
    out = given.out or Path("results") / "gpu" / f"{given.stage}.json"
    if given.part:
        run_part(given.part, out, given.device)
    else:
        run_stage(given.stage, out, given.device)


def run_part(part: str, out: Path, device: str) -> None:
    """One part, in this process."""
    import torch

    from benchmarks.gpu.record import Record

    module, function, seconds = part.split(":")
    record = Record(out, float(seconds))
    record.step("start", lambda: torch.zeros(1, device=device).device.type)
    getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)(record, torch.device(device))


def run_stage(stage: str, out: Path, device: str) -> None:
    """All parts of a stage, each in a process of its own."""
    begin = time.perf_counter()
    results: dict[str, Any] = {"stage": stage, "machine": about(device)}
    print(json.dumps(results, indent=1), flush=True)
    parts = STAGES[stage]
    for group in [[part] for part in parts] if stage in TIMED else [parts]:
        for running in [Part(stage, *part, out, device) for part in group]:
            results[running.name] = running.ended()
            write(results, out, begin)
    summary(results, out)


def write(results: dict[str, Any], out: Path, begin: float) -> None:
    results["seconds"] = round(time.perf_counter() - begin, 1)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


class Part:
    """A part of a stage that runs in a process of its own."""

    def __init__(self, stage: str, module: str, name: str, seconds: int, out: Path, device: str) -> None:
        self.name = name
        self._until = time.perf_counter() + seconds + GRACE
        self._path = out.with_name(f"{out.stem}-{name}.json")
        self._path.unlink(missing_ok=True)
        how = {"PYTHONUNBUFFERED": "1", "OUTRIDER_COSTS": "off"}
        if device.startswith("cuda"):
            how["TRITON_INTERPRET"] = "0"
        here = [sys.executable, "-m", "benchmarks.gpu", stage, "--part", f"{module}:{name}:{seconds}"]
        self._process = subprocess.Popen(
            [*here, "--out", str(self._path), "--device", device],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **how},
            start_new_session=True,  # a compiler that it started ends with it
        )
        self._reader = threading.Thread(target=relay, args=(self._process, name), daemon=True)
        self._reader.start()

    def ended(self) -> dict[str, Any]:
        """How it ended, and what its steps found."""
        try:
            status: int | str = self._process.wait(max(1.0, self._until - time.perf_counter()))
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            status = "killed: it took too long"
        self._reader.join(10)
        steps = json.loads(self._path.read_text("utf-8")) if self._path.exists() else {}
        self._path.unlink(missing_ok=True)
        return {"status": status, "steps": steps}


def relay(process: subprocess.Popen[str], name: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(f"[{name}] {line}", end="", flush=True)


def about(device: str) -> dict[str, Any]:
    import torch
    import transformers

    found: dict[str, Any] = {"python": sys.version.split()[0], "torch": torch.__version__}
    found["transformers"] = transformers.__version__
    for name in ("triton", "pydantic"):
        try:
            found[name] = importlib.import_module(name).__version__
        except ImportError as error:
            found[name] = str(error)
    if device.startswith("cuda"):
        try:
            of = torch.cuda.get_device_properties(device)
            found |= {"gpu": of.name, "bytes": of.total_memory, "processors": of.multi_processor_count}
        except Exception as error:  # the parts say more
            found["gpu"] = repr(error)
    return found


def summary(results: dict[str, Any], out: Path) -> None:
    """A short table of what failed."""
    print(f"\n{results['stage']}: {results['seconds']} s, {out}")
    for part, found in results.items():
        if not isinstance(found, dict) or "status" not in found:
            continue
        steps = found.get("steps", {})
        bad = [name for name, step in steps.items() if "error" in step or wrong(step.get("result"))]
        left = [name for name, step in steps.items() if "left_out" in step]
        ends = f"wrong or failed: {bad or 'none'}, left out: {left or 'none'}"
        print(f"{part}: status {found['status']}, {len(steps)} steps, {ends}")


def wrong(result: Any) -> bool:
    return isinstance(result, dict) and result.get("right") is False


if __name__ == "__main__":
    main()
