"""The package as Python sees it: its names, and `python -m outrider`."""

from __future__ import annotations

import subprocess
import sys

import pytest

import outrider


def test_dir_lists_the_public_names() -> None:
    assert set(outrider.__all__) <= set(dir(outrider))
    assert "__version__" in dir(outrider)


@pytest.mark.parametrize(
    ("arguments", "code", "shown"),
    [
        (["--version"], 0, f"outrider {outrider.__version__}"),
        (["--help"], 0, "Usage: python -m outrider "),
        (["speculate"], 2, "No such command 'speculate'"),
    ],
)
def test_the_package_runs_as_the_command(arguments: list[str], code: int, shown: str) -> None:
    done = subprocess.run([sys.executable, "-m", "outrider", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert shown in done.stdout + done.stderr
