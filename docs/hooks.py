"""What the documentation site has beside its pages: files of the repository that they link to, and the command's options.

mkdocs calls the functions whose names begin with `on_`.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
#: Scripts and styles of the Learn page have a digest in their names.
BUILT = ROOT / "src" / "outrider" / "server" / "pages" / "built"
#: Links to files, with their anchors; those to other sites and within a page are left alone.
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
_SEARCH = 'class="md-search" data-md-component="search" role="dialog"'
_COMMAND = "<!-- the options of the command -->"


def on_config(config: Any) -> Any:
    """A site of one version does not look for others."""
    if "MIKE_DOCS_VERSION" in os.environ:
        config.extra["version"] = {"provider": "mike"}
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the icon, the Learn page with its record as the front page, and what pages link to outside of docs/."""
    files.append(File.generated(config, "images/icon.svg", abs_src_path=str(ROOT / "web" / "src" / "icon.svg")))
    files.append(File.generated(config, "index.html", abs_src_path=str(DOCS / "front.html")))
    for path in sorted(set(BUILT.glob("*-*.*")) - set(BUILT.glob("playground-*"))):
        files.append(File.generated(config, f"learn/{path.name}", abs_src_path=str(path)))
    for path in sorted(_linked()):
        files.append(File.generated(config, _place(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Let links lead to where files are on the site."""
    uri = page.file.src_uri
    here = uri.removeprefix("project/") if uri.startswith("project/") else f"docs/{uri}"

    def moved(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), found[1]))
        return f"]({posixpath.relpath(_place(target), posixpath.dirname(uri))}{found[2] or ''})"

    parts = _CODE.split(markdown.replace(_COMMAND, _options() if _COMMAND in markdown else ""))
    return "".join(part if place % 2 else _LINK.sub(moved, part) for place, part in enumerate(parts))


def on_post_page(output: str, page: Page, config: Any) -> str:
    """Name the search box for a screen reader, and let empty corners of tables be no headers."""
    output = output.replace(_SEARCH, f'{_SEARCH} aria-label="Search"')
    return re.sub(r"<th([^>]*)>\s*</th>", r"<td\1></td>", output)


def _place(path: str) -> str:
    """Where a file of the repository is among the sources of the site."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"project/{path}"


def _linked() -> set[str]:
    """Files outside of docs/ that pages link to, and those that these link to."""
    found: set[str] = set()
    waiting = [path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.md")]
    while waiting:
        here = waiting.pop()
        new = {path for path in _targets(here) if not path.startswith("docs/")} - found
        found |= new
        waiting += [path for path in new if path.endswith(".md")]
    return found


def _targets(here: str) -> Iterator[str]:
    text = _CODE.sub("", (ROOT / here).read_text("utf-8"))
    for target, _ in _LINK.findall(text):
        yield posixpath.normpath(posixpath.join(posixpath.dirname(here), target))


def _options() -> str:
    """Every verb of the command with its options, as Typer writes them."""
    from typer.cli import get_docs_for_click
    from typer.main import get_command

    from outrider.cli.app import app

    command = get_command(app)
    context = command.make_context("outrider", [], resilient_parsing=True)
    return get_docs_for_click(obj=command, ctx=context, name="outrider").partition("\n")[2]
