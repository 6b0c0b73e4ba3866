"""Measures which planted bugs the core of the tests catches without the tests of this folder.

    python -m tests.mutation.without_kills map REACH.json            which core tests run which lines of the package
    python -m tests.mutation.without_kills run REACH.json OUT.jsonl  plants every bug, and runs core tests that come by it

A bug counts as caught where a core test turns red. Of the tests that come by its lines, those run first before which
the others of their file take least time, until one is red or BUDGET seconds are over. What does not end in time is not
caught. C has no lines here: for a bug in it, tests that use the kernels run.
`map` needs the package coverage. `run` goes on where it was ended.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.mutation.mutants import Mutant
from tests.mutation.native_mutants import NATIVE_MUTANTS
from tests.mutation.room_mutants import ROOM_MUTANTS
from tests.mutation.test_mutants import KILLED, PACKAGE, ROOT, plant
from tests.mutation.test_native_mutants import NATIVE, build_script
from tests.mutation.triton_mutants import TRITON_MUTANTS
from tests.warm import warm_python

#: Seconds for one bug, and how many tests a process runs before the next one begins.
BUDGET, AT_ONCE = 240.0, 60
#: How tests run here: one after another, and modules that were imported before pytest are no error.
_QUIETLY = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "default::pytest.PytestAssertRewriteWarning")
#: How a run of pytest ends in which nothing is red.
GREEN = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
#: Modules whose lines stand for those of the compiled kernels.
_KERNELS = ("kernels/",)


class Reach:
    """A plugin of pytest: the lines of the package that each test runs, and its seconds.

    Attributes:
        lines: By file of the package and line, the numbers of tests.
        tests: Their names and seconds.
    """

    def __init__(self) -> None:
        import coverage

        self.tests: list[tuple[str, float]] = []
        self.lines: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        self._coverage = coverage.Coverage(data_file=None, source_pkgs=["outrider"], config_file=False)
        self._coverage.set_option("run:disable_warnings", ["module-not-measured", "no-data-collected"])  # of short tests

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.erase()
        self._coverage.start()
        began = time.perf_counter()
        try:
            return (yield)
        finally:
            self._coverage.stop()
            number, data = len(self.tests), self._coverage.get_data()
            self.tests.append((item.nodeid, time.perf_counter() - began))
            for file in data.measured_files():
                name = Path(file).relative_to(PACKAGE).as_posix()
                for line in data.lines(file) or ():
                    self.lines[name][line].append(number)


def map_tests(out: Path) -> int:
    reach = Reach()
    status = pytest.main(["--fast", *_QUIETLY, f"--ignore={Path(__file__).parent}"], plugins=[reach])
    out.write_text(json.dumps({"tests": reach.tests, "lines": reach.lines}), "utf-8")
    return int(status)


def tests_by(mutant: Mutant, reach: dict[str, dict]) -> list[str]:
    """Core tests that come by a bug, so that all files get their share of the time: their quickest tests first.

    Where none comes by its lines, as with lines that run at import or in a server, these are tests that come by its file,
    and else those of the files that are called after a part of its path.
    """
    lines: dict[str, dict[str, list[int]]] = reach["lines"]
    if mutant.path.startswith(NATIVE):
        found = {t for file in lines if file.startswith(_KERNELS) for tests in lines[file].values() for t in tests}
    else:
        text = (PACKAGE / mutant.path).read_text("utf-8")
        first = text[: text.index(mutant.old)].count("\n") + 1
        own = range(first, first + mutant.old.rstrip("\n").count("\n") + 1)
        by_line = lines.get(mutant.path, {})
        found = {t for line in own for t in by_line.get(str(line), ())} or {t for ts in by_line.values() for t in ts}
    parts = Path(mutant.path).with_suffix("").parts
    named = {f"test_{part}.py" for part in parts}
    found = found or {i for i, (name, _) in enumerate(reach["tests"]) if Path(name.partition("::")[0]).name in named}
    spent: dict[str, float] = defaultdict(float)
    order = []
    for number in sorted(found, key=lambda t: reach["tests"][t][1]):
        name, seconds = reach["tests"][number]
        spent[name.partition("::")[0]] += seconds
        order.append((spent[name.partition("::")[0]], name))
    return [name for _, name in sorted(order)]


def red(mutant: Mutant, tests: list[str]) -> tuple[str, float]:
    """The first test that is red with the bug in the package and green without it, and the seconds until then.

    Where there is none, its line is empty. Without its test, it is the last line of a process that broke down.
    """
    began, left = time.monotonic(), list(tests)
    with tempfile.TemporaryDirectory() as folder:
        source = plant(mutant, Path(folder))
        kernels = {}
        if mutant.path.startswith(NATIVE):
            build_script().compile_kernels(source / "outrider" / NATIVE, ("generic",))
            kernels = {"OUTRIDER_KERNELS": "generic"}
            listed = _tested(["--collect-only"], BUDGET, {"PYTHONPATH": str(source), **kernels})
            if listed.returncode != pytest.ExitCode.OK:
                return (listed.stderr.strip() or listed.stdout.strip())[-300:], time.monotonic() - began
            there = set(listed.stdout.splitlines())
            left = [test for test in tests if test in there]  # with one instruction set there are no tests of the others
        with suppress(subprocess.TimeoutExpired):
            while left and (seconds := BUDGET - (time.monotonic() - began)) > 0:
                done = _tested(left[:AT_ONCE], seconds + 60, {"PYTHONPATH": str(source), **kernels})
                if done.returncode in GREEN:
                    left = left[AT_ONCE:]
                    continue
                lines = done.stdout.splitlines()
                found = [line for line in lines if line.startswith(("FAILED tests", "ERROR tests"))]
                test = found[0].partition(" ")[2].partition(" - ")[0] if found else ""
                if test not in left or _tested([test], BUDGET, kernels).returncode in GREEN:
                    return (found or lines[-1:] or ["?"])[0][:300], time.monotonic() - began
                left.remove(test)
    return "", time.monotonic() - began


def _tested(tests: Sequence[str], timeout: float, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A run of these tests.

    Raises:
        TimeoutExpired: It does not end.
        RuntimeError: pytest does not find one of them, and so has run none: the map is old.
    """
    one_thread = {"OMP_NUM_THREADS": "1", **environment}
    done = warm_python().run("pytest", "-x", *_QUIETLY, *tests, folder=ROOT, timeout=timeout, **one_thread)
    if "ERROR: not found: " in done.stderr:
        raise RuntimeError(done.stderr)
    return done


def run(reach_file: Path, out: Path) -> None:
    reach = json.loads(reach_file.read_text("utf-8"))
    known = {json.loads(line)["name"] for line in out.read_text("utf-8").splitlines()} if out.exists() else set()
    for mutant in (*ROOM_MUTANTS, *KILLED, *NATIVE_MUTANTS, *TRITON_MUTANTS):
        if mutant.name in known:
            continue
        tests = tests_by(mutant, reach)
        by, seconds = red(mutant, tests)
        found = {"name": mutant.name, "path": mutant.path, "tests": len(tests), "red": by, "seconds": round(seconds, 1)}
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        sys.stdout.write(f"{mutant.path}: {mutant.name}: {by or 'not caught'} ({seconds:.0f} s)\n")
        sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "map":
        sys.exit(map_tests(Path(sys.argv[2])))
    run(Path(sys.argv[2]), Path(sys.argv[3]))
