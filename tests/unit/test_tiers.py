"""The tiers of the tests: what `make test` runs, by marks, by path and by change."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import tiers


def item(path: str, *marks: pytest.MarkDecorator) -> Any:
    """A test of a file, with marks."""
    found = {mark.name: mark.mark for mark in marks}
    return SimpleNamespace(location=(path, 0, "test"), get_closest_marker=found.get)


@pytest.mark.parametrize(
    ("path", "marks", "changes", "runs"),
    [
        ("tests/unit/test_a.py", (), (), True),
        ("tests/unit/test_a.py", (pytest.mark.slow,), ("tests/unit/test_a.py",), False),
        ("tests/unit/test_a.py", (pytest.mark.by_change("src/a/", "src/b.py"),), (), False),
        ("tests/unit/test_a.py", (pytest.mark.by_change("src/a/", "src/b.py"),), ("src/ab.py", "src/c.py"), False),
        ("tests/unit/test_a.py", (pytest.mark.by_change("src/a/", "src/b.py"),), ("src/a/c.py",), True),
        ("tests/unit/test_a.py", (pytest.mark.by_change("src/a/"), pytest.mark.slow), ("src/a/c.py",), False),
        ("tests/pages/test_a.py", (), (), False),
        ("tests/pages/test_a.py", (), ("web/page.ts",), True),
        ("tests/pages/test_a.py", (), ("tests/pages/browser.py",), True),
        ("tests/pages/test_a.py", (pytest.mark.core,), (), True),
        ("tests/pages/test_a.py", (pytest.mark.core, pytest.mark.slow), ("web/page.ts",), False),
    ],
)
def test_what_runs(
    path: str, marks: tuple[Any, ...], changes: tuple[str, ...], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "BY_CHANGE", {"tests/pages/": ("web/",)})
    assert tiers.runs(item(path, *marks), frozenset(changes)) is runs


class Case(SimpleNamespace):
    """A case of a test, which a set can hold."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def case(name: str, path: str = "tests/unit/test_a.py", *marks: pytest.MarkDecorator, **params: object) -> Any:
    """A case of a test that is asked for two values together, for one of another list, and for one of a fixture."""
    found = {mark.name: mark.mark for mark in marks}
    lists = [pytest.mark.parametrize(names, []).mark for names in ("a, b", ["c"])]
    return Case(
        location=(path, 0, name),
        name=name,
        nodeid=f"{path}::{name}",
        get_closest_marker=found.get,
        iter_markers=lambda name: lists,
        callspec=SimpleNamespace(params=params),
    )


def test_of_a_product_every_value_runs_once() -> None:
    pairs, alone, fixtures = ((1, 1), (1, 2), (2, 1)), ("x", "y"), (7, 8)
    cases = [case(f"t[{a}{b}{c}{d}]", a=a, b=b, c=c, d=d) for (a, b), c, d in itertools.product(pairs, alone, fixtures)]
    other = case("u[1]", a=1, b=1, c="x", d=7)
    ran = tiers.chosen([*cases, other], frozenset())
    assert [each.name for each in ran] == ["t[11x7]", "t[12y8]", "t[21x7]", "u[1]"]
    assert tiers.chosen(cases, frozenset(["tests/unit/test_a.py"])) == cases, "its file changed"


def test_what_always_runs_and_what_has_one_list_is_whole() -> None:
    always = [
        case(f"t[{a}{c}]", "tests/unit/test_a.py", pytest.mark.core, a=a, b=1, c=c, d=1)
        for a, c in itertools.product((1, 2), (1, 2))
    ]
    one = [case(f"u[{a}{b}]", a=a, b=b, c=1, d=1) for a, b in itertools.product((1, 2), (1, 2))]
    assert tiers.chosen([*always, *one], frozenset()) == [*always, *one]


def test_every_path_of_the_table_is_there() -> None:
    for tests, paths in tiers.BY_CHANGE.items():
        for path in (tests, *paths):
            assert (tiers.ROOT / path).exists(), path


def test_changes_are_those_since_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        own = ("-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "init.defaultBranch=main")
        subprocess.run(["git", *own, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def commit(name: str) -> None:
        (tmp_path / name).write_text(name, "utf-8")
        git("add", name)
        git("commit", "-m", name)

    def changed(base: str) -> set[str]:
        monkeypatch.setenv("BASE", base)
        tiers.changed_paths.cache_clear()
        return set(tiers.changed_paths())

    monkeypatch.setattr(tiers, "ROOT", tmp_path)
    git("init")
    for name in ("one", "two", "three", "four"):
        commit(name)
    assert changed("") == {"four"}
    git("tag", "v1", "HEAD~2")
    assert changed("") == {"three", "four"}
    assert changed("HEAD~3") == {"two", "three", "four"}
    (tmp_path / "one").write_text("changed", "utf-8")
    (tmp_path / "new").write_text("new", "utf-8")
    assert changed("HEAD") == {"one", "new"}
    with pytest.raises(pytest.UsageError, match="BASE='elsewhere'"):
        changed("elsewhere")
    monkeypatch.setattr(tiers, "ROOT", tmp_path / "nowhere")
    (tmp_path / "nowhere").mkdir()
    git("init", "nowhere")
    assert changed("") == set()
    tiers.changed_paths.cache_clear()
