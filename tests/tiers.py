"""Which tests `make test` runs: the core, and of the tests by change those whose code a change touches.

A test belongs to one of three tiers. *Core* tests always run. Tests *by change* are those below a path of BY_CHANGE, except
what is marked `core` among them, and all that are marked `by_change(path, ...)`. `make test` runs them where a file
below one of their paths differs from the base, which is what the variable BASE of the environment names, else the last tag,
else the commit before the last one. Tests marked `slow` run in `make test-all` alone, which runs every test.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Tests, and what they are by change of: the beginnings of paths. A change of the tests themselves counts, too.
BY_CHANGE: dict[str, tuple[str, ...]] = {
    "tests/docs/test_everybody.py": ("docs/", "mkdocs.yml"),
    "tests/docs/test_front_page.py": ("docs/", "mkdocs.yml", "web/"),
    "tests/docs/test_python_blocks.py": ("docs/", "README.md", "src/outrider/__init__.py"),
    "tests/release/test_wheels.py": ("src/outrider/kernels/native/", "hatch_build.py", "pyproject.toml", "release/"),
    "tests/server/pages/": ("web/", "src/outrider/server/pages/", "src/outrider/server/answers.py"),
    "tests/server/test_replicas.py": ("src/outrider/server/replicas/",),
    "tests/train/": ("src/outrider/lab/train/",),
}


@cache
def changed_paths() -> frozenset[str]:
    """What differs from the base, in commits and in the working tree; nothing where there is no history.

    Raises:
        UsageError: BASE names no commit that the working tree has a common ancestor with.
    """
    asked = os.environ.get("BASE", "")
    base = asked or _git("describe", "--tags", "--abbrev=0") or _git("rev-parse", "--verify", "--quiet", "HEAD~1")
    since = _git("merge-base", base, "HEAD") if base else ""
    if asked and not since:
        raise pytest.UsageError(f"BASE={asked!r}: git finds no common ancestor with it. Give a commit, a branch or a tag.")
    changes = _git("diff", "--name-only", since) if since else ""
    return frozenset([*changes.splitlines(), *_git("ls-files", "--others", "--exclude-standard").splitlines()])


def _git(*arguments: str) -> str:
    """What git says; empty where it fails or is missing."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def touched(paths: Sequence[str], changes: frozenset[str]) -> bool:
    """Whether a change lies at or below one of these paths."""
    return any(change.startswith(path) for change in changes for path in paths)


def runs(item: pytest.Item, changes: frozenset[str]) -> bool:
    """Whether `make test` runs a test."""
    if item.get_closest_marker("slow"):
        return False
    if item.get_closest_marker("core"):
        return True
    marker = item.get_closest_marker("by_change")
    if marker:
        return touched(marker.args, changes)
    rows = [(tests, *paths) for tests, paths in BY_CHANGE.items() if item.location[0].startswith(tests)]
    return all(touched(row, changes) for row in rows)
