"""What is imported, and what is not, until the first token: told by the modules of a process, not by a clock."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
LIBRARY = """
from outrider import LLM, SamplingParams
LLM().generate("Once", SamplingParams(max_tokens=2))
"""
HEAVY = {"torch", "transformers", "numpy", "pydantic", "huggingface_hub"}
#: What only some runs need: drawing, grammars, other engines, other verbs, and the prover.
SELDOM = {"matplotlib", "llguidance", "gguf", "openvino", "openvino_genai", "xllamacpp", "sklearn", "pandas"}
SELDOM |= {"outrider.bench", "outrider.prove", "outrider.convert"}
#: What transformers imports beside a model, and a model of the command does not need.
BESIDE = {"scipy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.checkpoint"}


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
    ],
    ids=["import", "help", "library", "generate"],
)
def test_what_is_not_needed_is_not_imported(code: str, left_out: set[str]) -> None:
    found = imported(code)
    assert "outrider" in found
    assert not found & left_out


def test_what_the_command_left_out_can_still_be_imported() -> None:
    later = """
import gc, torch
assert gc.isenabled()
twice = torch.compile(lambda x: 2 * x, backend="eager")
assert twice(torch.ones(2)).tolist() == [2, 2]
import importlib.util
assert importlib.util.find_spec("scipy") is not None
"""
    assert "torch._dynamo" in imported(GENERATE + later)
