"""A checkpoint that does not fit is refused before a weight is read, and what is packed leaves its file's pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import LLM, SamplingParams
from outrider.config import ModelConfig
from outrider.errors import ModelTooLargeError
from outrider.kernels.packed import release, room
from outrider.loading import fit
from outrider.loading.fit import available_bytes, leaves_room, stored_tensors
from outrider.loading.loader import load_model
from tests.model import checkpoints

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoints.save("llama", tmp_path_factory.mktemp("fit"))


def limit(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(fit, "available_bytes", lambda device: size)


def stored_bytes(path: str) -> int:
    """In float32."""
    return sum(4 * tensor.numel() for file in Path(path).glob("*.safetensors") for tensor in load_file(file).values())


def sparse(folder: Path, tensors: dict[str, tuple[int, ...]], **config: Any) -> str:
    """A checkpoint of bf16 tensors whose file has a header, a length, and no numbers."""
    sizes = {name: 2 * torch.Size(shape).numel() for name, shape in tensors.items()}
    ends = [sum(list(sizes.values())[: i + 1]) for i in range(len(sizes))]
    header = {
        name: {"dtype": "BF16", "shape": shape, "data_offsets": [end - sizes[name], end]}
        for (name, shape), end in zip(tensors.items(), ends, strict=True)
    }
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + ends[-1])
    written = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **config}
    (folder / "config.json").write_text(json.dumps(written), "utf-8")
    return str(folder)


def test_the_numbers_are_those_of_the_files(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size = stored_bytes(path)
    assert sum(tensor.nbytes(torch.float32) for tensor in stored_tensors(Path(path))) == size
    assert sum(tensor.nbytes(torch.bfloat16) for tensor in stored_tensors(Path(path))) == size // 2
    limit(monkeypatch, size - 1)
    with pytest.raises(ModelTooLargeError) as caught:
        load_model(ModelConfig(model=path, dtype="float32"))
    error = caught.value
    assert (error.weight_bytes, error.kv_bytes, error.available_bytes) == (size, 0, size - 1)
    limit(monkeypatch, size)
    load_model(ModelConfig(model=path, dtype="float32"))


def test_keys_and_values_that_are_asked_for_count(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size, per_token = stored_bytes(path), 2 * 4 * 2 * 8 * 4  # keys and values, layers, heads, numbers of a head, bytes
    limit(monkeypatch, size + 100 * per_token)
    with pytest.raises(ModelTooLargeError, match="kv_cache_tokens=100 or less") as caught:
        LLM(path, dtype="float32", kv_cache_tokens=112)
    assert caught.value.kv_bytes == 112 * per_token
    LLM(path, dtype="float32", kv_cache_tokens=96)


def test_only_layers_that_keep_keys_and_values_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of four layers attends."""
    path = checkpoints.save("qwen3_next", tmp_path)
    size, per_token = stored_bytes(path), 2 * 1 * 2 * 8 * 4
    limit(monkeypatch, size + 100 * per_token)
    with pytest.raises(ModelTooLargeError, match="kv_cache_tokens=100 or less") as caught:
        load_model(ModelConfig(model=path, dtype="float32"), kv_tokens=112)
    assert caught.value.kv_bytes == 112 * per_token
    load_model(ModelConfig(model=path, dtype="float32"), kv_tokens=96)


def test_a_checkpoint_far_too_large_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"vocab_size": 128_000, "hidden_size": 16_384, "num_hidden_layers": 1, "num_attention_heads": 128}
    name = sparse(tmp_path, {"model.embed_tokens.weight": (128_000, 16_384), "lm_head.weight": (2**27, 16_384)}, **shape)
    with pytest.raises(ModelTooLargeError, match=r"4402\.2 GB .* in bfloat16.* Use a smaller model") as caught:
        LLM(name)
    assert caught.value.weight_bytes == 2 * 16_384 * (128_000 + 2**27)
    limit(monkeypatch, 3 * 2**40)
    with pytest.raises(ModelTooLargeError, match=r"Use quantization='int8' \(2203\.8 GB of weights\)\."):
        LLM(name)


def test_what_would_fit_is_said(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, stored_bytes(path) // 2)
    with pytest.raises(ModelTooLargeError, match=r"dtype='bfloat16' .*, or quantization='int8'"):
        LLM(path, dtype="float32")


@pytest.mark.parametrize("text", [b"", b"\xff" * 8, b"\x02" + bytes(7) + b"[]", b"\x08" + bytes(7) + b'{"a":{}}'])
def test_a_malformed_header_is_left_to_loading(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(text)
    assert stored_tensors(tmp_path) == []


def group(folder: Path, **files: int | str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n", "ascii")


def system(root: Path, own: str) -> None:
    group(root / "proc", meminfo="MemTotal: 9000 kB\nMemAvailable: 8000 kB")
    group(root / "proc" / "self", cgroup=own)


def test_the_limit_of_a_control_group_counts(tmp_path: Path) -> None:
    system(tmp_path, "0::/outer/inner")
    assert available_bytes(CPU, tmp_path) == 8000 * 1024
    mounted = tmp_path / "sys/fs/cgroup"
    group(mounted / "outer", memory__max=5_000_000, memory__current=3_000_000, memory__stat="anon 1\ninactive_file 500000")
    group(mounted / "outer/inner", memory__max="max", memory__current=1_000_000, memory__stat="inactive_file 0")
    assert available_bytes(CPU, tmp_path) == 2_500_000, "a page of a file can be taken back"


def test_the_limit_of_an_old_control_group_counts(tmp_path: Path) -> None:
    system(tmp_path, "4:memory:/job\n1:cpu:/other")
    mounted = tmp_path / "sys/fs/cgroup/memory"
    group(
        mounted / "job",
        memory__limit_in_bytes=4_000_000,
        memory__usage_in_bytes=3_000_000,
        memory__stat="total_inactive_file 200000",
    )
    assert available_bytes(CPU, tmp_path) == 1_200_000


def test_what_this_system_has_is_found() -> None:
    found = available_bytes(CPU)
    assert found is None or found > 0


def resident_bytes(file: Path) -> int:
    """Bytes of a mapped file that lie in this process's memory, and that it has not written to.

    Those of all files would count the pages of libraries as well, which come when a process first runs them.
    """
    found, mapped = 0, False
    for line in Path("/proc/self/smaps").read_text("utf-8").splitlines():
        name, *rest = line.split(maxsplit=5)
        if not name.endswith(":"):
            mapped = len(rest) == 5 and rest[4] == str(file)
        elif mapped and name in ("Rss:", "Anonymous:"):
            found += int(rest[0]) * (1024 if name == "Rss:" else -1024)
    return found


@pytest.mark.parametrize(("available", "found"), [(100, True), (98, False), (None, True)])
def test_room_is_half_of_the_memory_that_is_left(
    available: int | None, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "available_bytes", lambda device: available)
    assert leaves_room(50, torch.device("cpu")) is found


def test_released_pages_leave_memory_and_keep_their_numbers(tmp_path: Path) -> None:
    wanted = torch.arange(2**22, dtype=torch.float32)
    wanted.numpy().tofile(tmp_path / "numbers")
    mapped = torch.from_file(str(tmp_path / "numbers"), size=2**22, dtype=torch.float32)
    assert mapped.sum() > 0
    assert resident_bytes(tmp_path / "numbers") == mapped.nbytes
    release(mapped)
    assert resident_bytes(tmp_path / "numbers") == 0
    assert torch.equal(mapped, wanted)


def flags_at(address: int) -> list[str]:
    """How the system treats the memory at an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text("utf-8").splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            begin, end = (int(place, 16) for place in name.split("-"))
            inside = begin <= address < end
        elif inside and name == "VmFlags:":
            return rest
    raise AssertionError(f"nothing lies at {address:x}")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no large pages")
def test_weights_lie_on_large_pages_as_far_as_they_fill_them() -> None:
    page = 2**21
    numbers = room(2 * page + 1000)
    assert numbers.data_ptr() % page == 0
    assert "hg" in flags_at(numbers.data_ptr())
    assert "hg" in flags_at(numbers.data_ptr() + 2 * page - 1)
    assert "hg" not in flags_at(numbers.data_ptr() + 2 * page), "the rest of a large page would lie in memory, too"
    small = room(page - 1)
    assert small.data_ptr() % 64 == 0
    assert small.nbytes == page - 1


def test_memory_that_is_no_unchanged_file_is_left_alone(tmp_path: Path) -> None:
    numbers = torch.arange(2**20, dtype=torch.float32)
    kept = numbers.clone()
    release(kept)
    assert torch.equal(kept, numbers)
    numbers.numpy().tofile(tmp_path / "numbers")
    mapped = torch.from_file(str(tmp_path / "numbers"), shared=False, size=2**20, dtype=torch.float32)
    mapped[1000] = -1  # in this process alone
    release(mapped)
    assert mapped[1000] == -1


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_loaded_model_keeps_no_file_in_memory(tmp_path: Path, quantization: Any) -> None:
    name = checkpoints.save("llama", tmp_path)
    (file,) = Path(name).glob("*.safetensors")
    tensors = load_file(file)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    wide = 24_576
    config.update(intermediate_size=wide, dtype="float32")
    for key in [key for key in tensors if ".mlp." in key]:
        shape = (32, wide) if "down" in key else (wide, 32)
        tensors[key] = torch.randn(shape) / wide
    save_file(tensors, file, {"format": "pt"})
    Path(name, "config.json").write_text(json.dumps(config), "utf-8")
    llm = LLM(name, quantization=quantization)
    assert llm.engine.runner.backend.name in ("fused", "paged")
    assert resident_bytes(file) < file.stat().st_size / 4
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0].outputs[0].token_ids
