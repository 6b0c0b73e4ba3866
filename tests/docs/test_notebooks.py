"""Every notebook among the examples runs from its first cell to its last, and is kept without outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {"__name__": "__main__"}
    for place, cell in enumerate(cells):
        assert not cell["outputs"], f"cell {place} is stored with its output"
        exec(compile("".join(cell["source"]), f"{path.name}, cell {place}", "exec"), names)
    assert capsys.readouterr().out


def test_there_is_one() -> None:
    assert [path.name for path in NOTEBOOKS] == ["generate.ipynb"]
