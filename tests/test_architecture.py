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

#: The engine, lower first; a module may import from its own layer and from those before it.
LAYERS = (
    ("errors",),
    ("draft", "results", "files", "config", "govern"),
    ("params", "kernels"),
    ("cache",),
    ("loading", "structured"),
    ("model", "verify"),
    ("heads",),
    ("propose", "records", "widen"),
    ("engine", "conversations"),
    ("prompts", "options"),
    ("building",),
    ("llm",),
    ("async_llm", "patching"),
    ("server",),
    ("cli",),
    ("__main__",),
)
#: The laboratory in the same order; it may import from all of the engine.
LABORATORY = (
    ("economics", "convert", "train", "prove"),
    ("measure",),
    ("peers", "doctor"),
    ("bench", "tune"),
    ("cli",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
RANK |= {f"lab.{name}": len(LAYERS) + rank for rank, names in enumerate(LABORATORY) for name in names}
#: Lines below which a module with one importer in its own package is a part of that importer.
SMALL = 80
NO_TORCH = (
    "results.py",
    "cache/blocks.py",
    "cache/state.py",
    "engine/scheduler.py",
    "engine/sequence.py",
    "engine/text.py",
    "propose/ngram.py",
    "propose/suffix.py",
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
    """The layer of a module by its dotted name; None for what is not ours and for the package itself."""
    package, *parts = module.split(".")
    depth = 2 if parts[:1] == ["lab"] else 1
    return ".".join(parts[:depth]) if package == "outrider" and len(parts) >= depth else None


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
        layer = layer_of(".".join(("outrider", *path.with_suffix("").parts)))
        if path.name != "__init__.py":  # that of the package names the public surface, loaded on first use
            assert layer in RANK, f"{path} belongs to no layer"
            assert upward_imports(source, layer) == [], path


def test_the_engine_does_not_import_the_laboratory() -> None:
    found = [path for path, source in SOURCES.items() if path.parts[0] != "lab" and "outrider.lab" in packages_of(source)]
    assert found == []


def packages_of(source: str) -> set[str]:
    """The packages of two names that a source imports from, as `outrider.lab`."""
    return {".".join(module.split(".")[:2]) for module, _ in imports(source)}


def test_an_upward_import_is_noticed() -> None:
    assert upward_imports("def f():\n    from outrider.engine.engine import Engine\n", "propose")
    assert upward_imports("from outrider.lab.measure import figures\n", "engine")
    assert not upward_imports("from outrider.verify.noise import Key\n", "propose")
    assert packages_of("def f():\n    import outrider.lab.cli.bench\n") == {"outrider.lab"}


def test_transformers_is_imported_only_where_models_live() -> None:
    where = {path.parts[0] for path, source in SOURCES.items() if imports_of("transformers", source)}
    assert where <= {"loading", "model", "heads", "patching.py", "widen.py", "lab", "cli"}


def test_bookkeeping_needs_no_torch() -> None:
    needed = {name: {module for module, only_types in imports(SOURCES[Path(name)]) if not only_types} for name in NO_TORCH}
    assert [name for name, modules in needed.items() if any(module.startswith("torch") for module in modules)] == []


@cache
def modules() -> dict[str, frozenset[str]]:
    """The modules that each module imports, those for type checking and those inside functions, too."""
    names = {".".join(("outrider", *path.with_suffix("").parts)): source for path, source in SOURCES.items()}
    return {
        name: frozenset(
            target
            for module, _ in imports(source)
            for target in (module, module.rpartition(".")[0])
            if target in names and target != name
        )
        for name, source in names.items()
    }


def test_modules_do_not_import_each_other_in_circles() -> None:
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"circle: {' -> '.join((*trail, name))}"
        if name not in done:
            for target in modules()[name]:
                visit(target, (*trail, name))
            done.add(name)

    for name in modules():
        visit(name, ())


def test_what_is_small_and_has_one_caller_lives_with_its_caller() -> None:
    importers: dict[str, set[str]] = {}
    for name, targets in modules().items():
        for target in targets:
            importers.setdefault(target, set()).add(name)
    lines = {".".join(("outrider", *path.with_suffix("").parts)): source.count("\n") for path, source in SOURCES.items()}
    lonely = [
        name
        for name, users in importers.items()
        if lines[name] < SMALL
        and {user.rpartition(".")[0] for user in users} == {name.rpartition(".")[0]}
        and len(users) == 1
    ]
    assert lonely == []


def test_only_the_command_line_prints() -> None:
    for path, source in SOURCES.items():
        calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
        prints = any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls)
        assert "cli" in path.parts or not prints, path


VERBS_OF_THE_ENGINE = "import outrider.cli.generate, outrider.cli.chat, outrider.cli.serve"


@pytest.mark.parametrize("statement", ["import outrider", "import outrider.cli.app", VERBS_OF_THE_ENGINE])
def test_importing_stays_light(statement: str) -> None:
    code = (
        f"import sys; {statement}; heavy = {{'torch', 'transformers', 'outrider.lab'}} & set(sys.modules);"
        "assert not heavy, f'{heavy} were imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
