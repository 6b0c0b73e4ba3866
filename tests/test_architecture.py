"""Imports point downward only, heavy libraries stay where they belong, and importing the package costs nothing."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import outrider

PACKAGE = Path(outrider.__file__).parent

#: From low to high. A module may import from its own layer and from those before it, never from its equals.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "validation", "params", "config"),
    ("kernels",),
    ("cache",),
    ("model",),
    ("verify",),
    ("propose",),
    ("govern",),
    ("engine",),
    ("llm",),
    ("prove", "bench", "train", "server"),
    ("cli",),
)
#: The lowest layer holds single files that build on each other; acyclicity is checked for them as for all others.
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

#: Files whose work is bookkeeping: no tensors.
WITHOUT_TORCH = ("cache/blocks.py", "engine/scheduler.py", "engine/sequence.py", "propose/ngram.py")

#: The only places outside model/ and prove/ that may import from transformers, and what.
TRANSFORMERS_ELSEWHERE = {"cli": ("transformers.utils",)}  # to quieten its logging


#: Calls that import the module they name.
DYNAMIC = ("import_module", "importlib.import_module", "__import__")


@dataclass(frozen=True)
class Import:
    """One import of a module, wherever it stands in the file."""

    target: str
    line: int
    typing_only: bool


def imports_of(source: str, module: str, *, is_package: bool = False) -> Iterator[Import]:
    """Every import of a file by absolute module name, those inside functions included."""
    tree = ast.parse(source)
    guarded = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    base = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        typing_only = node in guarded
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, typing_only)
        elif isinstance(node, ast.ImportFrom):
            parts = base[: len(base) - node.level + 1] if node.level else []
            origin = ".".join([*parts, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(f"{origin}.{alias.name}", node.lineno, typing_only)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in DYNAMIC and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield Import(name.value, node.lineno, typing_only)


def layer_of(module: str) -> str:
    """First name below the package: "outrider.engine.engine" is in "engine"; the package itself is in ""."""
    return [*module.split("."), ""][1]


def upward_imports(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Imports of `module` that point to a higher layer, or to another name of the same layer."""
    found = []
    here = layer_of(module)
    for item in imports_of(source, module, is_package=is_package):
        there = layer_of(item.target) if item.target.split(".")[0] == "outrider" else None
        if there is None or there == here or there not in RANK:
            continue
        allowed = RANK[there] < RANK[here] or RANK[there] == RANK[here] == 0
        if not allowed:
            found.append(f"{module}:{item.line} imports {item.target}")
    return found


def module_name(path: Path) -> str:
    parts = ["outrider", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = sorted(PACKAGE.rglob("*.py"))
INNER = [path for path in FILES if path != PACKAGE / "__init__.py"]


def _id(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_every_file_belongs_to_a_layer() -> None:
    assert {layer_of(module_name(path)) for path in INNER} <= set(RANK)
    assert len(INNER) > 30, "the files were found"


@pytest.mark.parametrize("path", INNER, ids=_id)
def test_imports_point_downward(path: Path) -> None:
    assert upward_imports(path.read_text(), module_name(path), is_package=path.name == "__init__.py") == []


@pytest.mark.parametrize(
    "line",
    [
        "from outrider.engine.engine import Engine",
        "import outrider.engine.engine",
        "from outrider import engine",
        "from ..engine import engine",
        "from .. import engine",
        "from ..engine.engine import Engine as E",
        "def late():\n    from outrider.engine.engine import Engine",
        "async def late():\n    if True:\n        import outrider.llm",
        "from importlib import import_module\nimport_module('outrider.llm')",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from outrider.engine.sequence import Sequence",
    ],
)
def test_an_upward_import_is_caught_however_it_is_written(line: str) -> None:
    assert len(upward_imports(line, "outrider.cache.fake")) == 1


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("outrider.server.app", "from outrider.bench import report"),  # a sibling on the same layer
        ("outrider.llm", "from outrider.cli.main import main"),
        ("outrider.errors", "import outrider.kernels.linear"),
    ],
)
def test_siblings_and_neighbours_above_are_caught(module: str, line: str) -> None:
    assert upward_imports(line, module)


@pytest.mark.parametrize(
    "line",
    ["from outrider.errors import InputError", "from outrider.cache import pool", "import os", "from . import blocks"],
)
def test_downward_and_inner_imports_pass(line: str) -> None:
    assert upward_imports(line, "outrider.cache.fake") == []


def _foreign(path: Path, library: str) -> list[Import]:
    return [item for item in imports_of(path.read_text(), module_name(path)) if item.target.split(".")[0] == library]


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_bookkeeping_needs_no_torch(name: str) -> None:
    assert _foreign(PACKAGE / name, "torch") == []


def test_transformers_is_met_in_the_model_layer() -> None:
    strays = []
    for path in INNER:
        layer = layer_of(module_name(path))
        if layer in ("model", "prove"):  # the proofs hold the engine against stock transformers models
            continue
        allowed = TRANSFORMERS_ELSEWHERE.get(layer, ())
        strays += [
            f"{_id(path)}:{item.line} {item.target}"
            for item in _foreign(path, "transformers")
            if not item.typing_only and not item.target.startswith(allowed or "\0")
        ]
    assert strays == []
    assert any(_foreign(path, "transformers") for path in INNER), "the search finds what there is"


def _prints(source: str) -> list[int]:
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


def test_nothing_prints_outside_the_command_line() -> None:
    strays = {_id(path): _prints(path.read_text()) for path in INNER if layer_of(module_name(path)) != "cli"}
    assert {name: lines for name, lines in strays.items() if lines} == {}
    assert _prints("def f():\n    print(1)") == [2]


def import_graph(sources: dict[str, str], packages: set[str]) -> dict[str, set[str]]:
    """Which file imports which at run time, by module name; a name from a package counts as the package's file."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        edges = set()
        for item in imports_of(source, module, is_package=module in packages):
            if item.typing_only:
                continue
            target = item.target
            while target and target not in sources:
                target = target.rpartition(".")[0]
            if target and target != module and target != "outrider":
                edges.add(target)
        graph[module] = edges
    return graph


def test_the_import_graph_has_no_cycle() -> None:
    sources = {module_name(path): path.read_text() for path in FILES}
    graph = import_graph(sources, {module_name(path) for path in FILES if path.name == "__init__.py"})
    assert "outrider.engine.scheduler" in graph["outrider.engine.engine"]
    assert len(list(TopologicalSorter(graph).static_order())) == len(sources)  # raises CycleError where there is one


def test_a_cycle_inside_a_layer_is_caught() -> None:
    sources = {
        "outrider.model.a": "def f():\n    from outrider.model.b import g",
        "outrider.model.b": "import outrider.model.c",
        "outrider.model.c": "from . import a",
        "outrider.model": "",
    }
    with pytest.raises(CycleError):
        list(TopologicalSorter(import_graph(sources, {"outrider.model"})).static_order())


@pytest.mark.parametrize("module", ["outrider", "outrider.cli.main", "outrider.params", "outrider.config"])
def test_importing_it_loads_no_heavy_library(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'tokenizers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_public_names_are_there_and_lead_home() -> None:
    for name in outrider.__all__:
        assert getattr(outrider, name).__name__ == name
    assert {"LLM", "SamplingParams", "SpeculationConfig"} <= set(outrider.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = outrider.no_such_name


def test_every_module_can_be_found_by_its_name() -> None:
    for path in INNER:
        assert importlib.util.find_spec(module_name(path)) is not None, path
