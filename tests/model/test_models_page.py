"""docs/reference/models.md says what the probe says, for the families the project is tested with."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from outrider.kernels.library import kernel_library
from outrider.model.families import FAMILIES
from tests.model.core import core

DOCS = Path(__file__).parents[2] / "docs"
TESTED = (
    *FAMILIES,
    "gemma3",
    "falcon",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
    "bert",
    "mamba",
    "olmo_hybrid",
    "recurrent_gemma",
)
#: Types whose decoder is of a type that the kernels know.
SAME_DECODER = {"gemma3", "gpt-sw3", "moss_transcribe_diarize", "qwen3_5", "qwen3_5_moe"}


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_models", DOCS / "make_models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["make_models"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


#: One of those that the kernels know, one of each other answer, and all where an answer may change.
FEW = ("llama", "gpt2", "mixtral", "falcon", "bert", "mamba", "recurrent_gemma")


@pytest.mark.parametrize(
    "kind", core(TESTED, FEW, "src/outrider/model/", "docs/make_models.py", "docs/reference/models.md")
)
def test_the_page_is_what_the_probe_says(maker: ModuleType, kind: str) -> None:
    listed = re.search(rf"^\| {kind} \| ([\w, ]+) \|", (DOCS / "reference" / "models.md").read_text("utf-8"), re.MULTILINE)
    assert listed is not None
    expected = listed[1] if kernel_library() else listed[1].removeprefix("fused, ")
    assert expected == maker.judge(kind).shown


def test_the_table_of_files_is_what_is_known_of_them(maker: ModuleType) -> None:
    assert (DOCS / "reference" / "models.md").read_text("utf-8").endswith(maker.files())
    rows = [line for line in maker.files().splitlines() if line.endswith((" yes |", " not known |"))]
    assert len(rows) == 50
    assert sum(row.endswith(" yes |") for row in rows) >= 45
    assert maker.obstacle_of_a_file("llama", "gpt2", "of nobody") == "the tokenizer"


def test_the_page_calls_those_fused_that_the_kernels_know() -> None:
    fused = re.findall(
        r"^\| ([\w-]+) \| fused, paged \|", (DOCS / "reference" / "models.md").read_text("utf-8"), re.MULTILINE
    )
    assert set(fused) == {*FAMILIES, *SAME_DECODER}
