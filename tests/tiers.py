"""Which tests `make test` runs: the core, and of the tests by change those whose code a change touches.

A test belongs to one of three tiers. *Core* tests always run. Tests *by change* are those below a path of BY_CHANGE, except
what is marked `core` among them, and all that are marked `by_change(path, ...)`. `make test` runs them where a file
below one of their paths differs from the base, which is what the variable BASE of the environment names, else the last tag,
else the commit before the last one. Tests marked `slow` run in `make test-all` alone, which runs every test.

A test that is asked for the product of several lists of values runs in `make test` for so many of their combinations that
every value occurs, unless it is marked `core` or its file changed.
"""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Where a checkpoint is read and becomes a model that computes, and where a draft is made beside that.
_MODELS = ("src/outrider/loading/", "src/outrider/model/")
_DRAFTS = ("src/outrider/heads/", "src/outrider/propose/", "src/outrider/engine/drafting/", "src/outrider/model/")
#: Tests, and what they are by change of: the beginnings of paths. A change of the tests themselves counts, too.
#: In the core others stand for them: of heads tests/model/test_heads.py and the laws of heads and of stages in
#: tests/statistical, of files tests/model/test_gguf_models.py, of states that run on tests/model/test_running_states.py.
BY_CHANGE: dict[str, tuple[str, ...]] = {
    "tests/docs/test_everybody.py": ("docs/", "mkdocs.yml"),
    "tests/docs/test_front_page.py": ("docs/", "mkdocs.yml", "web/"),
    "tests/docs/test_python_blocks.py": ("docs/", "README.md", "src/outrider/__init__.py"),
    "tests/docs/test_site.py": ("docs/", "mkdocs.yml", "src/outrider/__init__.py", "src/outrider/cli/"),
    "tests/model/test_assistants.py": (*_DRAFTS, "src/outrider/loading/"),
    "tests/model/test_auto_heads.py": _DRAFTS,
    "tests/model/test_block_heads.py": _DRAFTS,
    "tests/model/test_cross_vocabulary.py": _DRAFTS,
    "tests/model/test_feature_heads.py": _DRAFTS,
    "tests/model/test_gemma_heads.py": _DRAFTS,
    "tests/model/test_gguf_families.py": (*_MODELS, "src/outrider/lab/convert/"),
    "tests/model/test_gguf_head_conversion.py": (*_DRAFTS, *_MODELS, "src/outrider/lab/convert/"),
    "tests/model/test_gguf_heads.py": (*_DRAFTS, "src/outrider/loading/"),
    "tests/model/test_gguf_mtp.py": (*_DRAFTS, "src/outrider/loading/"),
    "tests/model/test_gguf_mtp_conversion.py": (*_DRAFTS, *_MODELS, "src/outrider/lab/convert/"),
    "tests/model/test_gguf_t5.py": _MODELS,
    "tests/model/test_hybrid_heads.py": _DRAFTS,
    "tests/model/test_parallel_heads.py": _DRAFTS,
    "tests/model/test_patched_encoders.py": _MODELS,
    "tests/model/test_resumed_passes.py": _DRAFTS,
    "tests/model/test_sequential_heads.py": _DRAFTS,
    "tests/model/test_staged.py": _DRAFTS,
    "tests/model/test_staged_heads.py": _DRAFTS,
    "tests/model/test_state_memory.py": ("src/outrider/cache/", "src/outrider/model/"),
    "tests/release/test_wheels.py": ("src/outrider/kernels/native/", "hatch_build.py", "pyproject.toml", "release/"),
    "tests/server/pages/": ("web/", "src/outrider/server/pages/", "src/outrider/server/answers.py"),
    "tests/server/test_document.py": ("README.md", "src/outrider/server/", "src/outrider/params.py"),
    "tests/server/test_replicas.py": ("src/outrider/server/replicas/",),
    "tests/server/test_soak.py": ("src/outrider/server/", "src/outrider/engine/"),
    "tests/train/": ("src/outrider/lab/train/", "src/outrider/heads/"),
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


def chosen(items: Sequence[pytest.Item], changes: frozenset[str]) -> list[pytest.Item]:
    """What `make test` runs of these tests."""
    running = [item for item in items if runs(item, changes)]
    products: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in running:
        if not item.get_closest_marker("core") and not touched([item.location[0]], changes):
            products[item.location[0], item.nodeid.partition("[")[0]].append(item)
    left = {item for its in products.values() for item in _crossings(its)}
    return [item for item in running if item not in left]


def _crossings(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Cases of one test, all of whose values occur in the other cases, too."""
    values = {item: _values(item) for item in items}
    missing, left = set[Hashable]().union(*values.values()), list(items)
    while missing:
        best = max(left, key=lambda item: len(values[item] & missing))  # the first of those that have most
        missing -= values[best]
        left.remove(best)
    return set(left)


def _values(item: pytest.Item) -> frozenset[Hashable]:
    """What a test is asked for: a value of each of its lists, or several where a list holds tuples for several names."""
    asked = getattr(item, "callspec", None)
    if asked is None:
        return frozenset([item.name])
    lists = [mark.args[0] for mark in item.iter_markers("parametrize")]
    names = [tuple(each.replace(" ", "").split(",")) if isinstance(each, str) else tuple(each) for each in lists]
    names += [(name,) for name in asked.params if not any(name in each for each in names)]  # of fixtures
    return frozenset((each, *(id(asked.params[name]) for name in each)) for each in names)


def runs(item: pytest.Item, changes: frozenset[str]) -> bool:
    """Whether `make test` runs a test, or the cases of it that are chosen."""
    if item.get_closest_marker("slow"):
        return False
    if item.get_closest_marker("core"):
        return True
    marker = item.get_closest_marker("by_change")
    if marker:
        return touched(marker.args, changes)
    rows = [(tests, *paths) for tests, paths in BY_CHANGE.items() if item.location[0].startswith(tests)]
    return all(touched(row, changes) for row in rows)
