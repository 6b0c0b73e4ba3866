"""Every block of Python on the site runs, against the server where it asks one."""

from __future__ import annotations

import ast
import gc
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import Block, blocks

BLOCKS = blocks("python")
ADDRESS = "http://127.0.0.1:8000"
KEY = "sk-3f9a"


def modules(code: str) -> set[str]:
    """What a block imports."""
    found = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {
        name
        for node in found
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
        if name
    }


#: Pages whose blocks always run: what most readers begin with.
CORE = ("README.md", "docs/tutorial.md", "docs/how-to/python.md")


def always(block: Block) -> list[pytest.MarkDecorator]:
    return [pytest.mark.core] if block.page in CORE else []


@pytest.mark.parametrize("block", [pytest.param(block, id=str(block), marks=always(block)) for block in BLOCKS])
def test_it_runs(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    absent = [name for name in modules(block.code) if name != "my_file" and find_spec(name.partition(".")[0]) is None]
    if absent:
        pytest.skip(f"not installed: {', '.join(absent)}")
    code = block.code
    if ADDRESS in code:
        server = request.getfixturevalue("server_with_keys" if KEY in code else "server")
        code = code.replace(ADDRESS, server.url)
    if ".gguf" in code:
        request.getfixturevalue("gguf_files")
    if "tuning/profile.json" in code:
        request.getfixturevalue("profile")
    names: dict[str, Any] = {"__name__": "page"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # pages leave their clients open, as people do
        exec(compile(code, str(block), "exec"), names)
        names.clear()
        gc.collect()  # so that no later test meets what this one left open


@pytest.mark.core
def test_there_are_blocks_of_every_kind_of_page() -> None:
    folders = {block.page.split("/")[1] for block in BLOCKS if block.page.startswith("docs/")}
    assert {"tutorial.md", "how-to", "reference"} <= folders
