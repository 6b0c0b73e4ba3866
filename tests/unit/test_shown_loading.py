"""What a terminal shows while a file is read: its bytes; and nothing where there is no terminal."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from outrider.cli.options import shown_loading
from outrider.loading.gguf.header import FileProgress, watched_reading


@pytest.mark.parametrize("terminal", [True, False])
def test_the_bytes_of_a_file_are_shown_on_a_terminal_alone(terminal: bool) -> None:
    paper = io.StringIO()
    console = Console(file=paper, force_terminal=terminal, width=80)
    draft = "a-much-smaller-model-of-the-same-family-instruct-q4_k_m.gguf"
    with shown_loading(console, "loading m.gguf") as show, watched_reading(show):
        for name, total in (("m.gguf", 4_000_000), (draft, 2_000_000)):
            reading = FileProgress(f"/somewhere/far/away/{name}", total)
            for _ in range(4):
                reading.advance(total // 4)
    FileProgress("m.gguf", 1_000).advance(500)  # nobody looks any more
    shown = paper.getvalue()
    assert shown.startswith("\x1b") is terminal
    assert ("4.0/4.0 MB" in shown) is ("2.0/2.0 MB" in shown) is terminal
    assert "bytes" not in shown
    bars = [line for line in re.split(r"[\r\n]|\x1b\[[0-9;?]*[A-Za-z]", shown) if line.strip()]
    assert ("m.gguf" in "".join(bars)) is ("a-much-smaller-mo…ruct-q4_k_m.gguf" in "".join(bars)) is terminal
    assert "somewhere" not in shown


def test_a_bar_ends_with_a_load_that_fails() -> None:
    paper = io.StringIO()
    console = Console(file=paper, force_terminal=True, width=90)

    def fail() -> None:
        with shown_loading(console, "loading m.gguf") as show:
            show("m.gguf", 500, 1_000)
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        fail()
    shown = paper.getvalue()
    assert "0.5/1.0 kB" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor is shown again"
