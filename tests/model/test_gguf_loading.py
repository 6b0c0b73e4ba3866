"""How GGUF files are loaded: they lie in memory once, and their bytes are counted while they are read."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from outrider import LLM, SamplingParams
from outrider.kernels.library import available_sets
from outrider.lab.measure.machine import MemoryWatch
from outrider.loading.gguf import header
from outrider.loading.gguf.header import read_gguf, watched_reading
from tests.model import checkpoints
from tests.model.core import of_formats
from tests.model.drawn_files import q4_k_m, write_drawn
from tests.model.gguf_files import Written

pytest.importorskip("gguf")
pytestmark = of_formats
SHAPE = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}
SETTINGS = {"speculation": "none", "kv_cache_tokens": 64, "max_model_len": 64, "max_num_seqs": 1}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak of a part of a process")
@pytest.mark.skipif(not available_sets(), reason="the kernels are not compiled here: no C compiler at build")
def test_a_file_lies_in_memory_once(tmp_path: Path) -> None:
    small = LlamaConfig(num_hidden_layers=1, vocab_size=256, **SHAPE | {"intermediate_size": 256})
    large = LlamaConfig(num_hidden_layers=4, vocab_size=65_536, **SHAPE)  # its head is almost half of it
    files = []
    for name, config in (("small", small), ("large", large)):
        files.append(tmp_path / f"{name}.gguf")
        size = write_drawn(files[-1], config, q4_k_m(config))
    greedy = SamplingParams(temperature=0, max_tokens=2)
    with LLM(str(files[0]), **SETTINGS) as llm:  # so that nothing is imported later
        llm.generate([[1, 2]], greedy)
    watch, told = MemoryWatch(torch.device("cpu")), []
    before = watch.peak().resident or 0
    with watched_reading(lambda _, done, total: told.append((done, total))), LLM(str(files[1]), **SETTINGS) as llm:
        llm.generate([[1, 2]], greedy)
        peak = watch.peak().resident
    assert peak is not None
    room = 40_000_000  # for what parts of tensors take one after another, and for logits, whatever the file's size
    assert peak - before < 1.1 * size + room, f"{(peak - before) / size:.2f} of the file"
    assert told[-1][0] == told[-1][1] <= size
    assert len(told) > 30
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_headers_are_read_once_while_models_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = []
    for name, layers in (("target", 2), ("draft", 1)):
        source = checkpoints.save("llama", tmp_path / name, layers=layers)
        files.append(Written(source, tmp_path / f"{name}.gguf", ("F32",)).path)
    reads, read = Counter[Path](), header._read
    monkeypatch.setattr(header, "_read", lambda path: reads.update([path]) or read(path))
    with LLM(str(files[0]), draft_model=str(files[1])) as llm:
        assert dict(reads) == dict.fromkeys(files, 1)
        assert not header._read_parts.cache_info().currsize  # nothing is kept when the models are there
        assert llm.speculation.candidates
    before = read_gguf(str(files[1]))
    assert read_gguf(str(files[1])) is before
    files[1].write_bytes(files[0].read_bytes())
    assert read_gguf(str(files[1])).tensors.keys() == read_gguf(str(files[0])).tensors.keys() > before.tensors.keys()
