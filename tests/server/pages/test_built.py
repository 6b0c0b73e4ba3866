"""The built pages are those of the sources in web/, and nobody has changed them by hand."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from outrider.server.pages.pages import BUILT

WEB = Path(__file__).parents[3] / "web"
SETTINGS = ("build.mjs", "package.json", "package-lock.json", "tsconfig.json")
REMEDY = "run `make pages`, and commit what it built"


pytestmark = pytest.mark.core


def digest(folder: Path, files: Iterable[Path]) -> str:
    """Of files, by name and content; web/build.mjs does the same."""
    found = hashlib.sha256()
    for file in sorted(files, key=str):
        found.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()


def test_the_build_fits_the_sources() -> None:
    told = json.loads((BUILT / "digests.json").read_text("utf-8"))
    sources = [path for path in (WEB / "src").rglob("*") if path.is_file()]
    assert told["sources"] == digest(WEB, [*sources, *(WEB / name for name in SETTINGS)]), REMEDY
    built = [path for path in BUILT.iterdir() if path.name != "digests.json"]
    assert told["built"] == digest(BUILT, built), REMEDY
    assert told["front"] == digest(WEB.parent, [WEB.parent / "docs" / "front.html"]), REMEDY


def test_the_build_is_small_and_names_nothing_elsewhere() -> None:
    files = [path for path in BUILT.iterdir() if path.suffix in (".html", ".js", ".css", ".svg")]
    assert sum(path.stat().st_size for path in files) < 300_000
    for path in files:
        text = path.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text, path.name
        assert "https://" not in text, path.name
