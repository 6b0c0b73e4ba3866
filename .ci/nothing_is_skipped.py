"""Stop where tests would be skipped in silence: without compiled kernels, or without a package that they need."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from outrider.kernels.library import FILE, available_sets

#: What the extra `dev` brings for tests that skip themselves elsewhere.
PACKAGES = (
    "accelerate",
    "axe_playwright_python",
    "compressed_tensors",
    "gguf",
    "llguidance",
    "matplotlib",
    "mkdocs",
    "playwright",
    "ray",
    "triton",
    "websockets",
)


def problems() -> list[str]:
    found = [
        f"the package {name} is not installed: install the extra `dev`." for name in PACKAGES if find_spec(name) is None
    ]
    if not available_sets():
        remedy = "Install a C compiler, run `python hatch_build.py` to see what it says, and install again."
        found.append(f"the kernels are not compiled: {FILE.name} is missing or does not fit this processor. {remedy}")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(f"Continuous integration would skip tests: {problem}" for problem in problems()) or None)
