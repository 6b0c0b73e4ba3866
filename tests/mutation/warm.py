"""A process that has imported what the package stands on, but not the package; it forks for each check of a mutant.

To import PyTorch and transformers takes longer than most checks. `python warm.py` reads a line of JSON for each check and
answers with the exit status of the fork.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[2]
#: Whatever checks import beside the package and the tests.
_BELOW = (
    *("numpy", "torch", "pydantic", "safetensors.torch", "tokenizers", "llguidance", "hypothesis", "pytest"),
    *("transformers", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama"),
    *("transformers.models.mistral.modeling_mistral", "transformers.integrations.sdpa_attention"),
)
#: Seconds that a check may take.
_LIMIT = 300


class WarmProcess:
    """The other end, in the process of the tests."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def run(self, check: str, source: Path, kernels: str) -> subprocess.CompletedProcess[str]:
        """Run a check on the package below `source`, with stock operators or given kernels."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        errors = source / "stderr.txt"
        order = {"check": check, "source": str(source), "kernels": kernels, "errors": str(errors)}
        self._process.stdin.write(json.dumps(order) + "\n")
        status = int(self._process.stdout.readline())
        return subprocess.CompletedProcess([check], status, stderr=errors.read_text("utf-8"))

    def close(self) -> None:
        with self._process:  # its input ends here
            pass


def _check(order: dict[str, str]) -> NoReturn:
    """In the fork: the check, on the planted package."""
    status = 1
    try:
        signal.alarm(_LIMIT)
        with open(order["errors"], "w") as errors:
            os.dup2(errors.fileno(), 1)
            os.dup2(errors.fileno(), 2)
        os.environ["OUTRIDER_KERNELS"] = order["kernels"]
        sys.path[:0] = [order["source"], str(ROOT)]
        from tests.mutation.judge import CHECKS, judge

        stopped = judge(CHECKS[order["check"]])
        if stopped is not None:
            sys.stderr.write(f"\n{stopped}")
        status = int(stopped is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _serve() -> None:
    sys.dont_write_bytecode = True
    own = {ROOT, ROOT / "src", Path(__file__).parent}  # and not all below ROOT: the environment may lie there
    sys.path = [place for place in sys.path if Path(place or ".").resolve() not in own]
    for name in _BELOW:
        importlib.import_module(name)
    assert "outrider" not in sys.modules
    import torch
    from hypothesis import Phase, settings

    torch.set_num_threads(1)
    settings.register_profile("found", phases=(Phase.explicit, Phase.generate))  # what shows a bug need not be small
    settings.load_profile("found")
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _check(json.loads(line))
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
