"""A method of the reader's own, from a file of the current folder, through the commands."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from outrider.cli.options import method_settings
from outrider.errors import InvalidParameterError
from outrider.lab.measure.decoding_config import parse_ways
from outrider.propose import settings
from tests.warm import warm_python

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "write_a_proposer.md"
SOURCES = Path(__file__).parents[2] / "src"


#: Where the commands may change that look at such a method, or the method itself.
of_commands = pytest.mark.by_change(
    *("src/outrider/lab/prove/", "src/outrider/cli/", "src/outrider/lab/bench/", "docs/how-to/write_a_proposer.md"),
    "tests/model/test_own_method.py",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Holds my_file.py with the method of docs/how-to/write_a_proposer.md."""
    block = re.search(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert block is not None
    (tmp_path / "my_file.py").write_text(block[1], "utf-8")
    return tmp_path


def outrider(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return warm_python().run("outrider", *arguments, folder=folder, timeout=300, PYTHONPATH=str(SOURCES))


@of_commands
def test_it_is_proved_and_the_verdict_is_stated(folder: Path) -> None:
    done = outrider(folder, "prove", "--method", '{"method": "my_file:Bigram", "shared": true}', "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("passed: all 8 checks hold (joints of 3 tokens)")
    assert done.stderr.startswith("8 checks")


@pytest.mark.slow
def test_one_that_lies_behind_the_horizon_passes_and_the_result_says_how_far_it_looked(folder: Path) -> None:
    (folder / "late.py").write_text(
        "from dataclasses import replace\n"
        "from typing import ClassVar\n"
        "from my_file import Bigram, BigramProposer\n"
        "class LateProposer(BigramProposer):\n"
        "    def propose(self, requests, noise):\n"
        "        drafts = super().propose(requests, noise)\n"
        "        return [d if d.draft_probs is None or len(r.sequence.token_ids) < 60 else\n"
        "                replace(d, draft_probs=d.draft_probs * 0.5 + 0.5 / d.draft_probs.shape[-1])\n"
        "                for r, d in zip(requests, drafts)]\n"
        "class Late(Bigram):\n"
        "    name: ClassVar[str] = 'late'\n"
        "    def build(self, context):\n"
        "        return LateProposer(context.target.vocab_size, shared=self.shared)\n"
    )
    done = outrider(folder, "prove", "--method", "late:Late", "--quick", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["horizon"] == "joints of 3 tokens"
    assert [check["horizon"] for check in report["checks"]] == [3] * 4 + [None] * 4


@of_commands
def test_one_that_biases_the_output_fails(folder: Path) -> None:
    (folder / "liar.py").write_text(
        "from dataclasses import replace\n"
        "from typing import ClassVar\n"
        "from my_file import Bigram, BigramProposer\n"
        "class LiarProposer(BigramProposer):\n"
        "    def propose(self, requests, noise):\n"
        "        drafts = super().propose(requests, noise)\n"
        "        return [d if d.draft_probs is None else replace(d, draft_probs=d.draft_probs * 0.5 + 0.5 / "
        "d.draft_probs.shape[-1]) for d in drafts]\n"
        "class Liar(Bigram):\n"
        "    name: ClassVar[str] = 'liar'\n"
        "    def build(self, context):\n"
        "        return LiarProposer(context.target.vocab_size, shared=self.shared)\n"
    )
    done = outrider(folder, "prove", "--method", "liar:Liar", "--quick", "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert not report["passed"]
    assert not report["checks"][0]["passed"]
    assert report["horizon"] == "joints of 3 tokens"


@of_commands
def test_it_is_measured_beside_plain_decoding(folder: Path) -> None:
    ways = ("--way", "plain", "--way", "my_file:Bigram:3")
    sizes = ("-w", "json", "-n", "1", "--max-tokens", "8", "--sampling", "T=1", "--batch", "1", "--json")
    done = outrider(folder, "bench", *ways, *sizes)
    assert done.returncode == 0, done.stderr
    assert "bigram k=3" in done.stdout


@pytest.mark.parametrize(
    ("method", "problem"),
    [
        ("nowhere:Bigram", "cannot be imported"),
        ("json:loads", "no method"),
        ("outrider.propose.settings:Method", "no method"),
        ("{oops", "not JSON"),
        ('{"shared": true}', "names no method"),
        ('["suffix"]', "no such method"),
    ],
)
def test_what_is_no_method_is_refused(method: str, problem: str) -> None:
    with pytest.raises(InvalidParameterError, match=problem):
        settings.find(method_settings(method)["method"])


def test_a_way_that_cannot_be_imported_is_no_way() -> None:
    with pytest.raises(InvalidParameterError, match="way='nowhere:Bigram:3'"):
        parse_ways(["nowhere:Bigram:3"], None)
