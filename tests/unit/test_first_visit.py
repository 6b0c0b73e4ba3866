"""What a visitor reads and runs first: the README, the snippets of the pages, and the two commands of the Makefile."""

from __future__ import annotations

import ast
import builtins
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.model.families import FAMILIES
from outrider.propose import settings

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
INSTALL = (ROOT / "docs" / "how-to" / "install.md").read_text("utf-8")
MODELS = (ROOT / "docs" / "reference" / "models.md").read_text("utf-8")
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


def snippets() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)):
            yield f"{page.name}, {number}", block


SNIPPETS = list(snippets())


def unbound(code: str) -> set[str]:
    """The names that a snippet reads and nobody has given a value."""
    bound, read = set(dir(builtins)), set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
    return read - bound


@pytest.mark.parametrize(("place", "code"), SNIPPETS, ids=[place for place, _ in SNIPPETS])
def test_a_snippet_brings_its_imports(place: str, code: str) -> None:
    assert unbound(code) == set(), place


def test_names_without_imports_are_found() -> None:
    assert unbound("llm = LLM()\nfor x in llm.generate('a'): print(x)") == {"LLM"}


def test_the_readme_is_short_and_says_how_many_families_run_in_the_kernels() -> None:
    assert len(README.splitlines()) <= 100
    (count,) = re.findall(r"in the kernels for (\d+) families", README)
    assert int(count) == len(FAMILIES)
    (count, names) = re.findall(r"in the kernels for (\d+) families[^:]*:(.*?)\.\n", MODELS, re.DOTALL)[0]
    assert int(count) == len(FAMILIES)
    assert re.findall(r"`(\w+)`", names) == sorted(FAMILIES)


def test_figures_of_the_readme_stand_on_the_page_of_performance() -> None:
    """Whoever measures anew changes both."""
    measured = (ROOT / "docs" / "explanation" / "performance.md").read_text("utf-8")
    figures = set(re.findall(r"(?<![\d.])\d+\.\d\d?(?![\d.])", README.partition("## Speed")[2].partition("\n## ")[0]))
    figures |= set(re.findall(r"writes (\d+\.\d)", README))
    assert len(figures) > 10
    assert [figure for figure in sorted(figures) if f"{figure}" not in measured] == []


def test_a_link_leads_to_the_page_that_names_every_method() -> None:
    page = (ROOT / "docs" / "reference" / "methods.md").read_text("utf-8")
    assert "](docs/reference/methods.md)" in README
    assert [name for name in settings._BUILT_IN if f"\n## {name}\n" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        found = (page.parent / path) if path else page
        assert found.exists(), target
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found.read_text("utf-8")), target


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


# -- the two commands --------------------------------------------------------------------------------------------------


def would_run(*words: str) -> str:
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    own = {name: value for name, value in os.environ.items() if name != "VENV" and not name.startswith("MAKE")}
    command = ["make", "--no-print-directory", "--dry-run", "--always-make", *words]  # not as the make above these tests
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=own)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", ["demo", "test"])
def test_the_two_commands_need_no_index(command: str) -> None:
    said = would_run(command)
    (install,) = (line for line in said.splitlines() if "constraints.txt" in line and "pip install" in line)
    assert "index" not in install
    assert "find-links" not in install
    for name in ("constraints.txt", "pyproject.toml"):
        lines = (line.strip() for line in (ROOT / name).read_text("utf-8").splitlines())
        assert not [line for line in lines if re.match(r"(-i|-f|--\S*index\S*|--find-links)\b", line)]


def test_another_index_may_be_given() -> None:
    flags = "--extra-index-url https://example.org/cpu"
    assert f"install --quiet {flags} -c constraints.txt" in would_run("demo", f"PIP_FLAGS={flags}")
    for text in (README, INSTALL):
        assert 'PIP_FLAGS="--extra-index-url URL"' in text


def test_who_has_seen_the_demo_knows_how_to_go_on() -> None:
    assert "source .venv/bin/activate" in would_run("demo").splitlines()[-1]
    assert "source .venv/bin/activate" in README
