"""Imports point downward only, heavy ones stay where they belong, and nothing prints but the command line."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "outrider"
#: The source of every module, by its path in the package.
SOURCES = {path.relative_to(PACKAGE): path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}

#: Lower first; a module may import from its own layer and from those before it.
LAYERS = (
    ("errors", "embedded"),
    ("validation", "files"),
    ("draft", "trace", "stats", "params", "request_options", "config"),
    ("kernels",),
    ("cache",),
    ("structured",),
    ("model",),
    ("heads",),
    ("verify",),
    ("propose",),
    ("govern",),
    ("engine",),
    ("arguments",),
    ("prompts",),
    ("profile",),
    ("options",),
    ("building",),
    ("llm",),
    ("async_llm", "patching"),
    ("measure",),
    ("convert",),
    ("prove", "bench", "train", "server"),
    ("doctor",),
    ("tuning",),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
NO_TORCH = (
    "trace.py",
    "cache/blocks.py",
    "cache/layer_spec.py",
    "cache/state.py",
    "engine/scheduling/scheduler.py",
    "engine/sequence.py",
    "engine/detokenizer.py",
    "propose/registry.py",
    "propose/methods/ngram.py",
    "propose/methods/suffix.py",
)


@cache
def imports(source: str) -> tuple[tuple[str, bool], ...]:
    """Every absolute import, those inside functions too: (module, only for type checking)."""
    return tuple(_imports(source))


def _imports(source: str) -> Iterator[tuple[str, bool]]:
    tree = ast.parse(source)
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in guarded) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from ((f"{node.module}.{alias.name}", id(node) in guarded) for alias in node.names)


def imports_of(package: str, source: str) -> bool:
    return any(module.split(".")[0] == package for module, _ in imports(source))


def layer_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "outrider" and len(parts) > 1 else None


def upward_imports(source: str, layer: str) -> list[str]:
    """Imports of `source`, a module of `layer`, that point to a higher layer."""
    found = []
    for module, _ in imports(source):
        target = layer_of(module)
        if target in RANK and RANK[target] > RANK[layer]:
            found.append(module)
    return found


def test_imports_point_downward() -> None:
    for path, source in SOURCES.items():
        layer = path.parts[0].removesuffix(".py")
        if layer != "__init__":  # which names the public surface, loaded on first use
            assert layer in RANK, f"{path} belongs to no layer"
            assert upward_imports(source, layer) == [], path


def test_an_upward_import_is_noticed() -> None:
    assert upward_imports("def f():\n    from outrider.engine.engine import Engine\n", "propose")
    assert not upward_imports("from outrider.verify.noise import Key\n", "propose")


def test_transformers_is_imported_only_where_models_live() -> None:
    where = {path.parts[0] for path, source in SOURCES.items() if imports_of("transformers", source)}
    assert where <= {"model", "patching", "convert", "prove", "measure", "bench", "train", "cli"}


def test_bookkeeping_needs_no_torch() -> None:
    assert [name for name in NO_TORCH if imports_of("torch", SOURCES[Path(name)])] == []


def test_modules_do_not_import_each_other_in_circles() -> None:
    names = {".".join(("outrider", *path.with_suffix("").parts)): source for path, source in SOURCES.items()}
    edges = {
        name: {
            target
            for module, only_types in imports(source)
            if not only_types
            for target in (module, module.rpartition(".")[0])
            if target in names and target != name
        }
        for name, source in names.items()
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"circle: {' -> '.join((*trail, name))}"
        if name not in done:
            for target in edges[name]:
                visit(target, (*trail, name))
            done.add(name)

    for name in names:
        visit(name, ())


def test_only_the_command_line_prints() -> None:
    for path, source in SOURCES.items():
        calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
        prints = any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls)
        assert path.parts[0] == "cli" or not prints, path


@pytest.mark.parametrize("statement", ["import outrider", "import outrider.cli.app"])
def test_importing_stays_light(statement: str) -> None:
    code = f"import sys; {statement}; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
