"""The first second, and memory: how long until the first token, and what a checkpoint takes while it loads and afterwards.

    python -m benchmarks.cold_start                       starts and loads, five rounds; writes benchmarks/results/
    python -m benchmarks.cold_start --layers 28           loads a model of 3.2 billion weights instead of one of 0.8

Every round starts each process once, one after another. The figures are medians of rounds:

- the time of a bare import of PyTorch and transformers, with the names that a real load takes from it; of
  `outrider --help`; of `outrider generate` with one token of the embedded pair; of the same from Python; and of one token
  of the embedded target by transformers alone;
- of a random checkpoint in bfloat16, that was read just before: the time to read its files once more from the memory of the
  system, into a small buffer and into memory that the system gives for them; to load it; and the processor time of all
  three; what lies in memory afterwards, and most while it loads: pages of files, and others.
"""

from __future__ import annotations

import argparse
import json
import mmap
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from outrider.config import default_model
from outrider.lab.measure.machine import describe

RESULTS = Path(__file__).parent / "results" / "cold_start.json"
COMMAND = [sys.executable, "-m", "outrider"]
STARTS = {
    "bare import": [
        sys.executable, "-c", "import torch, transformers; from transformers import AutoModelForCausalLM, AutoTokenizer",
    ],
    "outrider --help": [*COMMAND, "--help"],
    "outrider generate, one token": [*COMMAND, "generate", "--prompt", "Once", "--max-tokens", "1"],
    "LLM().generate, one token": [
        sys.executable, "-c",
        "from outrider import LLM, SamplingParams; LLM().generate('Once', SamplingParams(max_tokens=1))",
    ],
    "transformers' generate, one token": [
        sys.executable, "-c",
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"folder = {default_model('target')!r}\n"
        "prompt = AutoTokenizer.from_pretrained(folder)('Once', return_tensors='pt')\n"
        "AutoModelForCausalLM.from_pretrained(folder).generate(**prompt, max_new_tokens=1)",
    ],
}  # fmt: skip
#: The shape of the checkpoint, but for its layers.
SHAPE: dict[str, Any] = {
    "vocab_size": 128_256, "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24,
    "num_key_value_heads": 8, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
#: Run in a process of its own; prints what one load took.
LOAD = """
import json, resource, sys, threading, time
from pathlib import Path
from outrider import LLM
from benchmarks.cold_start import memory, processor_seconds, read, read_to_keep

folder, settings = sys.argv[1], json.loads(sys.argv[2])
before, found = memory(), {}
def timed(name, function, *arguments, **keywords):
    start, begun = time.perf_counter(), processor_seconds()
    result = function(*arguments, **keywords)
    found[name + "_seconds"] = time.perf_counter() - start
    found[name + "_processor_seconds"] = processor_seconds() - begun
    return result
size = timed("read", read, Path(folder))
read_to_keep(Path(folder))  # so that the system has as much memory at hand
timed("keep", read_to_keep, Path(folder))
peak, done = dict(before), threading.Event()
def watch():
    while not done.wait(0.02):
        for name, value in memory().items():
            peak[name] = max(peak[name], value)
watcher = threading.Thread(target=watch)
watcher.start()
llm = timed("load", LLM, folder, max_model_len=2048, **settings)
done.set()
watcher.join()
runner = llm.engine.runner
found |= {"file_bytes": size, "weight_bytes": runner.backend.weight_bytes(runner.loaded.model), "before": before}
found |= {"after": memory(), "peak": peak, "backend": runner.backend.name}
sys.stdout.write("\\n" + json.dumps(found))
"""


def memory() -> dict[str, int]:
    """Bytes of this process that lie in memory: pages of mapped files, and others."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss")}
    return {"file": sizes["RssFile"], "other": sizes["RssAnon"]}


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def read(folder: Path) -> int:
    """Read all files of a checkpoint; their size."""
    buffer, size = bytearray(2**24), 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                size += count
    return size


def read_to_keep(folder: Path) -> None:
    """Read all files of a checkpoint into memory of their own, as whoever keeps them must."""
    kept = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            kept.append(mmap.mmap(-1, path.stat().st_size))
            view, begin = memoryview(kept[-1]), 0
            while count := file.readinto(view[begin : begin + 2**24]):
                begin += count
            view.release()
    for memory_of_file in kept:
        memory_of_file.close()


def make_checkpoint(folder: Path, layers: int) -> None:
    """A random model of Llama's shape, in several files."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=layers, dtype="bfloat16")).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(2**24, generator=generator).mul_(0.02).to(torch.bfloat16)
    for index, weight in enumerate(model.parameters()):
        flat, begin = weight.data.view(-1), index % 1000
        while begin < len(flat):  # the same numbers again and again: drawing them would take minutes
            end = min(len(flat), begin + len(numbers))
            flat[begin:end] = numbers[: end - begin]
            begin = end
        flat[: index % 1000] = 0.01
    model.save_pretrained(folder, max_shard_size="1700MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4, help="of the checkpoint")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    results: dict[str, Any] = {"machine": describe(torch.device("cpu")), "rounds": chosen.rounds}
    results["starts"] = starts(chosen.rounds)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), chosen.layers)
        results["loads"] = {
            name: loads(folder, settings, chosen.rounds)
            for name, settings in {"bfloat16": {}, "int8": {"quantization": "int8"}}.items()
        }
    chosen.out.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    show(results)


def starts(rounds: int) -> dict[str, dict[str, float]]:
    """Seconds from start to end of each process, and of processor time."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in STARTS}
    for _ in range(rounds + 1):
        for name, command in STARTS.items():
            before, start = resource.getrusage(resource.RUSAGE_CHILDREN), perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            took, after = perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
            used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            seconds[name].append((took, used))
    return {  # without the first round, which reads files
        name: {"seconds": median(took for took, _ in found[1:]), "processor_seconds": median(used for _, used in found[1:])}
        for name, found in seconds.items()
    }


def loads(folder: str, settings: dict[str, Any], rounds: int) -> dict[str, Any]:
    """What loading took: medians for times, and the last round's memory."""
    found = []
    for _ in range(rounds):
        read(Path(folder))
        command = [sys.executable, "-c", LOAD, folder, json.dumps(settings)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    times = {name: median(one[name] for one in found) for name in found[0] if name.endswith("seconds")}
    return {**found[-1], **times}


def show(results: dict[str, Any]) -> None:
    console = Console()
    bare = results["starts"]["bare import"]
    table = Table("", "seconds", "processor time", "over the bare import", title="From start to end")
    for name, took in results["starts"].items():
        ratio = took["seconds"] / bare["seconds"]
        table.add_row(name, f"{took['seconds']:.2f}", f"{took['processor_seconds']:.2f}", f"{ratio:.2f}")
    console.print(table)
    names = ("", "files, GB", "read, s", "and keep, s", "load, s", "weights, GB", "after: files", "others")
    table = Table(*names, "most: files", "others")
    for name, load in results["loads"].items():
        sizes = [load["weight_bytes"], *load["after"].values(), *load["peak"].values()]
        times = [f"{load[name]:.2f}" for name in ("read_seconds", "keep_seconds", "load_seconds")]
        table.add_row(name, f"{load['file_bytes'] / 1e9:.2f}", *times, *(f"{size / 1e9:.2f}" for size in sizes))
    console.print(table)


if __name__ == "__main__":
    main()
