"""The documentation site is built without a warning, loads nothing from elsewhere, and its reference is the code itself."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from typer.main import get_command

import outrider
from outrider.cli.app import app
from tests.docs.blocks import ROOT
from tests.server.running import Server


def text_of(page: Path) -> str:
    return re.sub(r"<[^>]+>", "", page.read_text("utf-8"))


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]* src=[\"']?([^\"' >]+)", page.read_text("utf-8"))
        loaded += re.findall(r"<link[^>]* href=[\"']?([^\"' >]+)", page.read_text("utf-8"))
        assert [url for url in loaded if "//" in url] == [], page
    for style in site.rglob("*.css"):
        assert re.findall(r"@import|url\([\"']?(?:https?:)?//", style.read_text("utf-8")) == [], style


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    page = (site / "reference" / "python" / "index.html").read_text("utf-8")
    assert [name for name in outrider.__all__ if f'id="{outrider._HOMES[name]}.{name}"' not in page] == []


def options() -> Iterator[str]:
    """Every option of every verb."""
    waiting = [get_command(app)]
    while waiting:
        verb = waiting.pop()
        waiting += getattr(verb, "commands", {}).values()
        yield from (option for parameter in verb.params for option in parameter.opts if option.startswith("--"))


def test_every_option_of_the_command_is_in_the_reference(site: Path) -> None:
    said = text_of(site / "reference" / "command" / "index.html")
    assert len(set(options())) > 60
    assert [option for option in set(options()) if option not in said] == []


def test_every_variable_and_every_parameter_is_in_the_reference() -> None:
    sources = (path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    variables = {name for source in sources for name in re.findall(r"\bOUTRIDER_[A-Z_]*[A-Z]\b", source)}
    assert len(variables) >= 5
    for page, names in (("command", variables), ("parameters", set(outrider.SamplingParams.model_fields))):
        rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "reference" / f"{page}.md").read_text("utf-8"), re.MULTILINE)
        assert sorted(names - set(rows)) == [], page


def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_metrics", ROOT / "docs" / "make_metrics.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_metrics_is_what_a_server_tells(server: Server) -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text("utf-8")
    assert page == maker().page(server.get("/metrics").text), "run: python docs/make_metrics.py"
