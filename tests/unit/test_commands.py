"""The commands of the project: what `make` and continuous integration run, leave out and refuse."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from outrider.kernels.library import available_sets

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "outrider"


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment that make takes for installed: a Python that is this one."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    python = tmp_path / "venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', "utf-8")
    python.chmod(0o755)
    (tmp_path / "venv" / ".installed").touch()
    return tmp_path / "venv"


def dry(target: str, venv: Path) -> str:
    command = ["make", "--dry-run", target, f"VENV={venv}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def ci(venv: Path, source: Path) -> subprocess.CompletedProcess[str]:
    """A run of continuous integration; not with the variables of the make above these tests, which go before ours."""
    above = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    environment = {**above, "VENV": str(venv), "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([ROOT / ".ci" / "run"], env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.by_change(".ci/", "Makefile", "pyproject.toml")
def test_continuous_integration_refuses_a_machine_without_kernels(venv: Path, tmp_path: Path) -> None:
    copy = tmp_path / "src" / "outrider"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("assets", "__pycache__", "kernels.so"))
    result = ci(venv, copy.parent)
    assert result.returncode != 0
    assert "the kernels are not compiled: kernels.so is missing" in result.stderr
    assert "Install a C compiler" in result.stderr
    assert "ruff" not in result.stdout  # it did not come to the tests


@pytest.mark.by_change(".ci/", "Makefile", "pyproject.toml")
@pytest.mark.skipif(not available_sets(), reason="the kernels are not compiled here: no C compiler at build")
def test_with_kernels_it_names_what_is_missing_alone() -> None:
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, ROOT / ".ci" / "nothing_is_skipped.py"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    names = ("accelerate", "axe_playwright_python", "gguf", "llguidance", "matplotlib", "playwright")
    missing = [name for name in names if find_spec(name) is None]
    assert result.returncode == (1 if missing else 0)
    assert [name for name in missing if f"the package {name} is not installed" in result.stderr] == missing
    assert "kernels" not in result.stderr


def test_the_extra_for_tests_brings_what_they_would_skip_without() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for name in ("gguf", "playwright", "axe-playwright-python", "compressed-tensors", "opentelemetry-sdk", "websockets"):
        assert any(requirement.startswith(name) for requirement in extras["dev"])
    assert "outrider[bench,docs,grammar,ray,release,serve,train,triton]" in extras["dev"]


def test_the_demo_installs_only_what_the_package_needs(tmp_path: Path) -> None:
    fresh = tmp_path / "fresh"
    assert "-e .\n" in dry("demo", fresh)
    assert "[dev]" not in dry("demo", fresh)
    assert "[dev]" in dry("test", fresh)
    (fresh / "bin").mkdir(parents=True)
    for stamp in (".installed", ".installed-light"):
        (fresh / stamp).touch()
    assert "pip install" not in dry("demo", fresh) + dry("test", fresh)


def test_what_is_slow_is_left_out_and_what_is_all_is_all(venv: Path) -> None:
    for target in ("test", "test-all"):
        lint, _, tests = dry(target, venv).rpartition("-m pytest")  # the first `-m pytest` only reads the tests
        assert "ruff check" in lint
        assert "mypy" in lint
        assert ("--fast" in tests) is (target == "test")


def test_the_tests_get_a_browser_and_go_on_without_one(venv: Path) -> None:
    for target in ("test", "test-all"):
        assert "apt-get install -qq -y --no-install-recommends chromium" in dry(target, venv)
    # No browser, and nobody who could install one: `make browser` says so, and does not fail.
    (venv / "only").mkdir()
    for name in ("make", "sh", "id"):
        (venv / "only" / name).symlink_to(shutil.which(name) or name)
    surroundings = {**os.environ, "PATH": str(venv / "only")}
    command = ["make", "browser", f"VENV={venv}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=surroundings)
    assert result.returncode == 0
    assert "will be skipped" in result.stdout


def test_measuring_leaves_tracked_files_alone(venv: Path) -> None:
    (out,) = (line.split("--out ")[1].split()[0] for line in dry("bench", venv).splitlines() if "--out " in line)
    folder = out.split("/")[0]
    assert f"/{folder}/" in (ROOT / ".gitignore").read_text("utf-8").splitlines()
