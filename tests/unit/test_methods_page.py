"""The pages about methods and statistics say what the classes say."""

from __future__ import annotations

import importlib.util
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from outrider.cli import options
from outrider.engine.stats import EngineStats
from outrider.propose import settings
from outrider.results import RequestStats

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {name: (DOCS / "reference" / name).read_text("utf-8") for name in ("methods.md", "statistics.md")}


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_methods", DOCS / "make_methods.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_what_the_classes_say(maker: ModuleType) -> None:
    assert maker.pages() == PAGES, "run: python docs/make_methods.py"


@pytest.mark.parametrize("name", sorted(settings._BUILT_IN))
def test_every_setting_of_a_method_has_a_row_with_its_default(maker: ModuleType, name: str) -> None:
    section = PAGES["methods.md"].split(f"\n## {name}\n")[1].split("\n## ")[0]
    kind = settings.find(name)
    for field, found in kind.model_fields.items():
        (row,) = [line for line in section.split("\n") if line.startswith(f"| `{field}` |")]
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert len(cells) == 5
        assert cells[2] == ("required" if found.is_required() else f"`{found.default!r}`")
        assert all(cells)
    usual = kind(**maker.REQUIRED.get(name, {}))
    assert f"unless given: {usual.usual_length()}\n" in section
    assert ("no. " in section) is (not usual.allows_tree)


@pytest.mark.parametrize("kind", [RequestStats, EngineStats])
def test_every_count_has_a_meaning(kind: type) -> None:
    section = PAGES["statistics.md"].split(f"\n## {kind.__name__}\n")[1].split("\n## ")[0]
    for field in fields(kind):
        assert f"| `{field.name}` | " in section


def test_the_help_of_the_commands_names_every_method() -> None:
    (option,) = options.Method.__metadata__
    for name in settings._BUILT_IN:
        assert f"{name} (" in option.help or f"{name}," in option.help, name
