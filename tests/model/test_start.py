"""What is imported, and what is not, until the first token: told by the modules of a process, not by a clock."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from outrider import LLM, building
from outrider.config import default_model

COMMAND = """
import sys
sys.argv = ["outrider", *{arguments!r}]
from outrider.cli.main import main
try:
    main()
except SystemExit as end:
    assert not end.code
"""
GENERATE = COMMAND.format(arguments=["generate", "--prompt", "Once", "--max-tokens", "2"])
SERVE = COMMAND.format(arguments=["serve", "/no/folder"]).replace("not end.code", "end.code == 2")
DRAFT = COMMAND.format(arguments=["generate", "-p", "Once", "--max-tokens", "2", "--draft-model", default_model("draft")])
RECORD = """
import pathlib, tempfile
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "keys").write_text("web: sk-1 record_mib=1")
kept = ["--record", str(folder / "kept"), "--api-key-file", str(folder / "keys")]
"""
RECORD += SERVE.replace("'/no/folder'", "'/no/folder', *kept")
SLIP = COMMAND.format(arguments=["serve", "m", "--prot", "80"]).replace("not end.code", "end.code == 2")
NO_FILE = COMMAND.format(arguments=["serve", "./nowhere.gguf"]).replace("not end.code", "end.code == 2")
LIBRARY = """
from outrider import LLM, SamplingParams
LLM().generate("Once", SamplingParams(max_tokens=2))
"""
#: Where a change may concern how PyTorch and transformers are imported.
of_imports = pytest.mark.by_change(
    *(
        "src/outrider/__init__.py",
        "src/outrider/cli/startup.py",
        "src/outrider/model/__init__.py",
        "src/outrider/loading/exclusive.py",
    ),
    "tests/model/test_start.py",
)
HEAVY = {"torch", "transformers", "numpy", "pydantic", "huggingface_hub"}
#: What only some runs need: drawing, grammars, other engines, other verbs, and the prover.
SELDOM = {"matplotlib", "llguidance", "gguf", "openvino", "openvino_genai", "xllamacpp", "sklearn", "pandas"}
SELDOM |= {"outrider.lab.bench", "outrider.lab.prove", "outrider.lab.convert"}
#: What transformers imports beside a model, and a model of the command does not need.
BESIDE = {"scipy", "sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.checkpoint"}


def imported(code: str) -> set[str]:
    """The modules that a process has after it has run some code."""
    show = "\nimport sys\nsys.stdout.write('\\n' + ' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code + show], check=True, capture_output=True, text=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("code", "left_out"),
    [
        ("import outrider", HEAVY | SELDOM | {"rich", "typer"}),
        (COMMAND.format(arguments=["--help"]), HEAVY | SELDOM),
        (LIBRARY, SELDOM | {"rich", "typer", "outrider.cli"}),
        (GENERATE, SELDOM | BESIDE),
        (SERVE, SELDOM | BESIDE | {"triton"}),
        (DRAFT, SELDOM | BESIDE | {"triton"}),
        (RECORD, SELDOM | BESIDE | {"triton"}),  # which tells at the end of a process what it leaks
        (SLIP, HEAVY - {"pydantic"} | SELDOM),
        (NO_FILE, HEAVY - {"pydantic"} | SELDOM),
    ],
    ids=["import", "help", "library", "generate", "serve", "draft", "record", "slip", "no file"],
)
def test_what_is_not_needed_is_not_imported(code: str, left_out: set[str]) -> None:
    found = imported(code)
    assert "outrider" in found
    assert code not in (SERVE, RECORD) or "torch" in found, "it came as far as the model"
    assert not found & left_out


@of_imports
def test_what_the_command_left_out_can_still_be_imported() -> None:
    later = """
import gc, torch
assert gc.isenabled()
twice = torch.compile(lambda x: 2 * x, backend="eager")
assert twice(torch.ones(2)).tolist() == [2, 2]
import importlib.util
assert importlib.util.find_spec("scipy") is not None
from torch.fx.experimental.symbolic_shapes import ShapeEnv, expect_true
import sympy
assert isinstance(sympy.Symbol("size"), sympy.Basic) and expect_true(True)
assert torch.zeros(2, 1, device="meta").add(torch.zeros(3, device="meta")).shape == (2, 3)
"""
    assert {"torch._dynamo", "sympy"} <= imported(GENERATE + later)


SYMBOLS = """
import sys, torch
from outrider.cli.startup import light_imports
with light_imports():
    from torch.fx.experimental.symbolic_shapes import expect_true, guard_or_false, is_nested_int, sym_and, sym_eq, sym_or
    assert expect_true(True) and not guard_or_false(False) and not is_nested_int(3)
    assert sym_and(True, True) and not sym_and(True, False) and sym_or(False, True)
    assert sym_eq((2, 3), (2, 3)) and not sym_eq((2, 3), (2, 4)) and not sym_eq((2,), (2, 2))
    torch.zeros(2, 1, device="meta") + torch.zeros(3, device="meta")
    assert not hasattr(sys.modules["sympy"], "__path__")
    {asked}
"""


@of_imports
@pytest.mark.parametrize(
    "asked",
    [
        "import sympy; sympy.Symbol('size') + 1",
        "sym_eq([2], [2])",
        "from torch.fx.experimental.symbolic_shapes import ShapeEnv",
    ],
)
def test_symbols_are_imported_as_soon_as_there_may_be_one(asked: str) -> None:
    found = imported(SYMBOLS.format(asked=asked))
    assert {"sympy.core", "torch.fx.experimental.symbolic_shapes"} & found


LISTED = """
import os, sys
listed = []
sys.addaudithook(lambda event, args: event == "os.scandir" and listed.append(os.fspath(args[0])))
{first}
import transformers.models
models = transformers.models.__path__[0]
assert listed.count(models) == {times}
from transformers.utils import import_utils
import_utils.define_import_structure.cache_clear()
import_utils.create_import_structure_from_path.cache_clear()
anew = import_utils.define_import_structure(models)
lists = type(transformers.models)("models", transformers.models.__file__, anew)
assert lists._class_to_module == transformers.models._class_to_module
assert lists._object_missing_backend == transformers.models._object_missing_backend
"""


@of_imports
@pytest.mark.parametrize(("first", "times"), [("import outrider.model", 1), ("import transformers", 2)])
def test_the_files_of_models_are_listed_once(first: str, times: int) -> None:
    imported(LISTED.format(first=first, times=times))


def test_a_load_is_not_searched_for_unused_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    searched, make = list[bool](), building.make_runner
    monkeypatch.setattr(building, "make_runner", lambda *a, **k: searched.append(gc.isenabled()) or make(*a, **k))
    LLM(kv_cache_tokens=512)
    assert searched
    assert not any(searched)
    assert gc.isenabled()


@of_imports
@pytest.mark.parametrize(("first", "kept"), [("", 0), ("gc.collect(); gc.freeze()", 1)], ids=["as usual", "frozen"])
def test_what_was_imported_is_not_searched_with_the_first_objects(first: str, kept: int) -> None:
    imported(f"""
import gc
{first}
from outrider import LLM
assert gc.isenabled() and bool(gc.get_freeze_count()) == {kept}, "what a caller froze stays so"
young = sum(len(gc.get_objects(generation=generation)) for generation in (0, 1))
assert {kept} or young < 1000, young
""")
