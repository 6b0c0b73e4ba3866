"""Options of llama.cpp's commands: a verb that is given one says what it is called here."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from typer.core import TyperCommand

from outrider.errors import InvalidParameterError

_PLACED = "Leave it out: a draft model lies where the target does."
_SHORT = "Leave it out: a draft ends where it no longer pays."
_LOOKUP = "Leave it out, and use --method suffix: it learns from the texts that are written."
#: Options of llama.cpp's commands for what is not set here.
_WITHOUT = {
    **dict.fromkeys(("--spec-draft-n-min", "--draft-min", "--draft-n-min", "--spec-ngram-mod-n-min"), _SHORT),
    **dict.fromkeys(("--spec-draft-p-split", "--draft-p-split"), "Use --tree 3,2,1 or best_first for drafts that branch."),
    **dict.fromkeys(("--spec-draft-ngl", "-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft"), _PLACED),
    **dict.fromkeys(("--spec-draft-device", "-devd", "--device-draft"), _PLACED),
    **dict.fromkeys(("--ctx-size-draft", "-cd"), "Leave it out: a draft model reads what the target reads."),
    **dict.fromkeys(("--lookup-cache-static", "-lcs", "--lookup-cache-dynamic", "-lcd"), _LOOKUP),
    **dict.fromkeys(("--model", "-m", "--hf-repo", "-hf"), "Give the model without an option."),
}

#: Methods of llama.cpp's kinds of drafting whose heads have a folder.
_WITH_HEADS = ("eagle3", "dflash")


class AnsweringCommand(TyperCommand):
    """A verb that answers options of llama.cpp with its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as usual, but for the error where an option is unknown."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if type(error).__name__ == "NoSuchOption":  # of a copy of click that typer may bring
                _answer(given, {option for each in self.params for option in each.opts})
            raise


def _answer(args: Sequence[str], known: Collection[str]) -> None:
    """Raise InvalidParameterError for those of these options that are llama.cpp's; it answers all of them."""
    remedies, values = dict[str, str](), dict[str, str]()
    for place, given in enumerate(args):
        option, has_value, value = given.partition("=")
        if not option.startswith("-") or option in known:
            continue
        value = value if has_value else next(iter(args[place + 1 :]), "")
        remedy = _remedy(option, value, known)
        if remedy is not None:
            remedies[option], values[option] = remedy, value
    if not remedies:
        return
    first, *others = remedies
    problem, remedy = "an option of llama.cpp", remedies[first]
    if others:
        problem += f", and so {'is' if len(others) == 1 else 'are'} {', '.join(others)}"
        remedy = " ".join(f"{option}: {each}" for option, each in remedies.items())
    raise InvalidParameterError(first, values[first], problem, remedy)


def _remedy(option: str, value: str, known: Collection[str]) -> str | None:
    """What a verb has in place of an option of llama.cpp; None for other options."""
    from outrider.config import Flag, declared
    from outrider.options import named_elsewhere

    found = named_elsewhere(option)
    if found is None:
        return _WITHOUT.get(option)
    owner, name = found
    verbs = [f"outrider {verb}" for field, flag in declared(owner, Flag) if field == name for verb in flag.verbs]
    if verbs and _option(name) not in known:
        return f"Leave it out: {_option(name)} is an option of {' and '.join(verbs)} alone."
    return f"Use {_said_here(owner, name, value, known)}."


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _said_here(owner: Any, name: str, value: str, known: Collection[str]) -> str:
    """The option that says the same, of those that a verb has."""
    from outrider.options import draft_setting
    from outrider.propose.settings import Method, SpeculationConfig

    own = _option(name)
    if owner is not SpeculationConfig and not issubclass(owner, Method):
        return f"{own} {value}"
    settings = draft_setting(owner, name, _number(value))
    method = settings.get("method", "draft_model")
    if method == "draft_model" and name in ("model", "method"):
        return f"--draft-model {value if name == 'model' else 'FILE'}"
    if name == "num_draft_tokens":
        return f"{own} {value}" if own in known else f"--way {method}:{value}"
    if method in _WITH_HEADS:
        settings["model"] = "FOLDER"
    if "--method" not in known:
        return f"--way {'plain' if method == 'none' else method}"
    return f"--method {method}" if settings.keys() == {"method"} else f"--method '{json.dumps(settings)}'"


def _number(value: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value
