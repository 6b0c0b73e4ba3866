"""Sizes that no model has: files that claim more are refused by name, before they cost what their bytes are not worth."""

from __future__ import annotations

import os

from outrider.errors import InvalidParameterError, ModelLoadError

#: The variable that sets other limits: names and numbers, as `layers=2000 added_tokens=100000`.
VARIABLE = "OUTRIDER_FILE_LIMITS"
#: The most that a file may have of something, far above what published models have. What a file costs grows with each.
LIMITS = {"layers": 1024, "token_characters": 2048, "added_tokens": 65_536, "template_bytes": 2**20}
#: How an error calls them.
_NAMES = {
    "layers": "{:,} layers",
    "token_characters": "a token of {:,} characters",
    "added_tokens": "{:,} tokens of control or of its own",
    "template_bytes": "a chat template of {:,} bytes",
}


def check_file_limit(model: str, name: str, found: int) -> None:
    """See that a file has no more of something than any model has."""
    most = file_limits()[name]
    if found > most:
        problem = f"it has {_NAMES[name].format(found)}, and {name} of files are limited to {most:,}"
        raise ModelLoadError(model, problem, f"Set {VARIABLE}={name}={found} if you trust it.")


def file_limits() -> dict[str, int]:
    """The limits, with those that the variable sets."""
    found = dict(LIMITS)
    for setting in os.environ.get(VARIABLE, "").replace(",", " ").split():
        name, _, value = setting.partition("=")
        if name not in LIMITS or not value.isascii() or not value.isdigit():
            remedy = f"Use names with numbers, like layers=2000, of {', '.join(LIMITS)}."
            raise InvalidParameterError(VARIABLE, setting, "it sets no limit of files", remedy)
        found[name] = int(value)
    return found
