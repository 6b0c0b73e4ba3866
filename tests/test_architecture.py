"""Imports point downward only, heavy ones stay where they belong, and nothing prints but the command line."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "outrider"
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))

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


def imports(source: str) -> Iterator[tuple[str, bool]]:
    """Every absolute import, those inside functions too: (module, only for type checking)."""
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


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downward(path: Path) -> None:
    relative = path.relative_to(PACKAGE)
    layer = relative.parts[0].removesuffix(".py")
    if layer == "__init__":
        return  # names the public surface, loaded on first use
    assert layer in RANK, f"{relative} belongs to no layer"
    assert upward_imports(path.read_text("utf-8"), layer) == []


def test_an_upward_import_is_noticed() -> None:
    assert upward_imports("def f():\n    from outrider.engine.engine import Engine\n", "propose")
    assert not upward_imports("from outrider.verify.noise import Key\n", "propose")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_transformers_is_imported_only_where_models_live(path: Path) -> None:
    relative = path.relative_to(PACKAGE)
    allowed = relative.parts[0] in ("model", "patching", "convert", "prove", "measure", "bench", "train", "cli")
    assert allowed or not any(module.split(".")[0] == "transformers" for module, _ in imports(path.read_text("utf-8")))


@pytest.mark.parametrize("name", NO_TORCH)
def test_bookkeeping_needs_no_torch(name: str) -> None:
    assert not any(module.split(".")[0] == "torch" for module, _ in imports((PACKAGE / name).read_text("utf-8")))


def test_modules_do_not_import_each_other_in_circles() -> None:
    names = {".".join(("outrider", *p.relative_to(PACKAGE).with_suffix("").parts)): p for p in MODULES}
    edges = {
        name: {
            target
            for module, only_types in imports(path.read_text("utf-8"))
            if not only_types
            for target in (module, module.rpartition(".")[0])
            if target in names and target != name
        }
        for name, path in names.items()
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


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_the_command_line_prints(path: Path) -> None:
    if path.relative_to(PACKAGE).parts[0] == "cli":
        return
    calls = (n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Call))
    assert not any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls)


@pytest.mark.parametrize("statement", ["import outrider", "import outrider.cli.app"])
def test_importing_stays_light(statement: str) -> None:
    code = f"import sys; {statement}; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
