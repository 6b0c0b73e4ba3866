"""Folders whose tokenizers have what no model has: refused by name, before they cost more than their bytes are worth."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from outrider.config import ModelConfig, default_model
from outrider.errors import ModelLoadError
from outrider.loading import tokenizers
from outrider.loading.tokenizers import given_tokenizer, read_tokenizer

COUNT = 1_000_000
FILES: dict[str, Any] = {
    "tokenizer.json": lambda n: {"added_tokens": [{"id": i, "content": f"<{i}>", "special": True} for i in range(n)]},
    "tokenizer_config.json": lambda n: {"added_tokens_decoder": {str(i): {"content": f"<{i}>"} for i in range(n)}},
    "special_tokens_map.json": lambda n: {"additional_special_tokens": [f"<{i}>" for i in range(n)]},
    "added_tokens.json": lambda n: {f"<{i}>": i for i in range(n)},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path in Path(default_model("target")).glob("*.json"):
        shutil.copy(path, tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("count", [pytest.param(COUNT, marks=pytest.mark.slow), 65_537])
def test_a_folder_with_a_million_added_tokens_is_refused_before_it_is_read(
    folder: Path, name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = json.loads((folder / name).read_text("utf-8")) if (folder / name).exists() else {}
    (folder / name).write_text(json.dumps({**before, **FILES[name](count)}, separators=(",", ":")), "utf-8")

    def read_by_the_library(*_: Any, **__: Any) -> None:
        raise AssertionError("this would take a minute")

    monkeypatch.setattr(tokenizers, "attempt", read_by_the_library)
    for read in (lambda: read_tokenizer(ModelConfig(model=str(folder))), lambda: given_tokenizer(folder)):
        with pytest.raises(ModelLoadError, match="added_tokens of files are limited to 65,536") as caught:
            read()
        assert f"it has {count:,} tokens" in str(caught.value)
        assert f"OUTRIDER_FILE_LIMITS=added_tokens={count}" in caught.value.remedy


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_template_that_no_model_has_is_refused(folder: Path, name: str) -> None:
    template = "{% set a = 1 %}" * 100_000
    text = template if name.endswith("jinja") else json.dumps({"chat_template": template})
    (folder / name).write_text(text, "utf-8")
    with pytest.raises(ModelLoadError, match="template_bytes of files are limited to 1,048,576"):
        read_tokenizer(ModelConfig(model=str(folder)))


def test_what_is_within_the_limits_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_tokenizer(ModelConfig(model=str(folder))) is not None
    for content in ("[", "[1]", '{"added_tokens": 3}'):  # what a library cannot read is its own to say
        (folder / "added_tokens.json").write_text(content, "utf-8")
        tokenizers.check_tokenizer_limits(str(folder))
