"""Conversations that ask for a file with an edit: where a text repeats its prompt.

    python -m benchmarks.edits edits.jsonl
    outrider bench MODEL --draft-model DRAFT --prompts edits.jsonl --max-tokens 160

The files are beginnings of modules of the standard library, cut at the end of a line.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path

#: Modules, and what is to be renamed in each.
EDITS = {
    "textwrap": ("fix_sentence_endings", "fix_endings"),
    "bisect": ("lo", "low"),
    "fnmatch": ("pat", "pattern"),
    "shlex": ("infile", "source"),
    "queue": ("maxsize", "capacity"),
    "sched": ("delayfunc", "sleep"),
}
_LENGTH = 3000


def conversations() -> list[dict[str, object]]:
    """A line of the file for each module."""
    found: list[dict[str, object]] = []
    for name, (old, new) in EDITS.items():
        source = inspect.getsource(__import__(name))[:_LENGTH].rpartition("\n")[0]
        task = f"Rename `{old}` to `{new}` in this file. Answer with the whole file and nothing else."
        asked = f"{task}\n\n```python\n{source}\n```"
        found.append({"category": "edits", "messages": [{"role": "user", "content": asked}]})
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(json.dumps(line) + "\n" for line in conversations()), "utf-8")
