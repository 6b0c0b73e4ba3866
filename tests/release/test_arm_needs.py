"""What `make arm` needs is said before it begins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_programs_that_are_missing_are_named_with_their_packages() -> None:
    command = [sys.executable, str(ROOT / "release" / "arm.py")]
    done = subprocess.run(command, env={"PATH": "/nowhere"}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "There is no qemu-aarch64 and no apt-get and no dpkg. It needs Debian on x86-64. "
        "As root: apt-get install qemu-user apt dpkg\n"
    )
