"""Write the pages of docs/reference about methods and statistics, from the settings of methods and the classes that count.

    python docs/make_methods.py

Meanings are the attributes of the classes' docstrings, and ranges are what the fields say when a value is refused. So the
pages cannot say anything else than the code does.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from outrider.engine.stats import EngineStats
from outrider.propose import settings
from outrider.propose.settings import Method, SpeculationConfig
from outrider.results import RequestStats

FOLDER = Path(__file__).parent / "reference"
INTRODUCTION = """# Methods

A *method* decides who drafts. Every method gives the same distribution of texts, and only the speed differs.
`docs/make_methods.py` writes this page from the code, and a test compares the two.

Ask for a method by its name or by its settings:

```python
from outrider import LLM, SpeculationConfig, Suffix

LLM(speculation="suffix")
LLM(speculation=SpeculationConfig(method=Suffix(branches=True), num_draft_tokens=16))
LLM(speculation={"method": "suffix", "branches": True, "num_draft_tokens": 16})
```

On the command line it is `--method suffix`, or `--method '{"method": "suffix", "branches": true}'`. In the benchmark it is
a way, like `--way suffix:16`. [Write a proposer](../how-to/write_a_proposer.md) says how to write a method of your own,
[What the methods gain](../explanation/what_methods_gain.md) how fast these are, and
[Losslessness](../explanation/losslessness.md) why the distribution stays.
[How the methods guess](../explanation/methods.md) has one line for each, except `auto`."""
_UNBOUNDED = {"bool": "true or false", "Method or None": "settings, or a name", "str or None": "any text"}
STATISTICS = """# Statistics

`docs/make_methods.py` writes this page from the code, and a test compares the two.

`RequestOutput.outputs[i].stats` holds the counts of one completion, and `LLM.stats` the totals of the engine."""
#: Settings of the methods that cannot do without.
REQUIRED: dict[str, dict[str, Any]] = {"staged": {"drafter": "suffix"}}
ALL_RULES = "`auto`, `block`, `token`, `walk` or `coupled`"
ONE_RULE = "its drafts are not drawn from known probabilities, so the walk checks them, whatever `rule` says"


def pages() -> dict[str, str]:
    """The text of each page, by its name."""
    parts = [INTRODUCTION, "## Settings around every method", _settings(SpeculationConfig)]
    for name in sorted(settings._BUILT_IN):
        parts += list(_method(settings.find(name)))
    counts = [STATISTICS]
    for kind in (RequestStats, EngineStats):
        counts += [f"## {kind.__name__}", _fields(kind)]
    return {"methods.md": "\n\n".join(parts) + "\n", "statistics.md": "\n\n".join(counts) + "\n"}


def _method(kind: type[Method]) -> Iterator[str]:
    """What is said of one method."""
    usual = kind(**REQUIRED.get(kind.name, {}))
    yield f"## {kind.name}"
    yield f"`{kind.__name__}`. {_first_sentence(kind)}"
    fixed = "yes" if usual.allows_tree else "no"
    if usual.allows_tree and kind.instead_of_tree != Method.instead_of_tree:
        fixed = f"by default; where its settings rule it out: {kind.instead_of_tree}"
    elif not usual.allows_tree:
        fixed = f"no. {kind.instead_of_tree}"
    grows = kind.grows_from_probabilities
    yield "\n".join(
        (
            f"- `num_draft_tokens`, unless given: {usual.usual_length()}",
            f"- trees of a fixed shape (`tree=(3, 2)`): {fixed}",
            f"- trees that adapt (`best_first`, `sequoia`): {'as trees of a fixed shape' if grows else 'no'}",
            f"- drafts that branch without a shape: {'yes' if kind.branches_freely else 'no'}",
            f"- rules: {ALL_RULES if grows else ONE_RULE}",
        )
    )
    yield _settings(kind)


def _first_sentence(kind: type) -> str:
    return " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())


def _settings(kind: Any) -> str:
    """A table of the settings of a class of pydantic."""
    meanings = _meanings(kind)
    hints = typing.get_type_hints(kind)
    rows = ["| setting | type | default | values | meaning |", "|---|---|---|---|---|"]
    for name, found in kind.model_fields.items():
        shown = _shown(hints[name])
        values = (found.description or "").rstrip(".").removeprefix("Use ") or (
            "true or false" if shown == "bool" else "any"
        )
        cells = (f"`{name}`", shown, "required" if found.is_required() else f"`{found.default!r}`", values, meanings[name])
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _fields(kind: type) -> str:
    """A table of the counts of a class, and of what follows from them."""
    rows = ["| field | meaning |", "|---|---|"]
    rows += [f"| `{name}` | {meaning} |" for name, meaning in _meanings(kind).items()]
    for name, found in vars(kind).items():
        if isinstance(found, property):
            rows.append(f"| `{name}` | {' '.join((inspect.getdoc(found) or '').split())} |")
    return "\n".join(rows)


def _meanings(kind: type) -> dict[str, str]:
    """The attributes of a class's docstring, and of those that it extends."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        _, _, attributes = (inspect.cleandoc(base.__dict__.get("__doc__") or "")).partition("Attributes:\n")
        attributes = attributes.split("\n\n")[0]
        for names, text in re.findall(r"^    (\w+(?:, \w+)*): (.*?)(?=^    \w|\Z)", attributes, re.MULTILINE | re.DOTALL):
            found |= {name: " ".join(text.split()) for name in names.split(", ")}
    return found


def _shown(hint: Any) -> str:
    """A type as readers write it."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _shown(inner[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_shown(kind) for kind in inner))
    if origin is Literal:
        return "str"
    if origin is tuple:
        return f"tuple of {_shown(inner[0])}"
    return "None" if hint is type(None) else getattr(hint, "__name__", str(hint))


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text, "utf-8")
