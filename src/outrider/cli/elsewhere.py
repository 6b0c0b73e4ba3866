"""What a verb says in words of its own options: of options of llama.cpp's commands, and of errors that name settings."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from typer.core import TyperCommand

from outrider.errors import InputError, InvalidParameterError, ModelError

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
    """A verb that answers options of llama.cpp with its own, and whose errors name its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as usual, but for the error where an option is unknown."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if type(error).__name__ == "NoSuchOption":  # of a copy of click that typer may bring
                _answer(given, {option for each in self.params for option in each.opts})
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        try:
            return super().invoke(ctx)
        except (InputError, ModelError) as error:
            error.args = (_in_options(error, self._options, self._typed(ctx)),)
            raise

    @property
    def _options(self) -> dict[str, str]:
        """The options by the names of the parameters that they set."""
        found = {each.name: [name for name in each.opts if name.startswith("--")] for each in self.params}
        return {str(name): names[0] for name, names in found.items() if names}

    def _typed(self, ctx: Any) -> dict[str, Any]:
        """What was typed behind options, by the names of the parameters."""
        sources = {name: ctx.get_parameter_source(name) for name in self._options}
        return {name: ctx.params[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}


# --- Options of llama.cpp's commands: a verb that is given one says what it is called here.


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


# --- Errors of the library name settings of Python. A verb tells them by the options that were typed.


#: A setting in the words of Python, alone or as a keyword of LLM.
_SETTING = re.compile(r"""(?<![\w.-])(LLM\((?:\.\.\., )?)?(\w+)=('[^']*'|"[^"]*"|[\w.:-]*\w)(?(1)\)|(?![(\w]))""")
#: Another way to say so in Python, for which the command has no other.
_ALSO_IN_PYTHON = re.compile(r", or SpeculationConfig\(.*\)(?=\.)")


def _in_options(error: InputError | ModelError, options: Mapping[str, str], typed: Mapping[str, Any]) -> str:
    """The message of an error, where the setting that it names is the option that was typed."""
    if "." in error.field if isinstance(error, InputError) else error.place:
        return str(error)  # it names a setting inside others, as they stand in JSON
    option, value = _blamed(error, options, typed)
    problem, remedy = _spelt(error.problem, options), _spelt(error.remedy, options)
    if option is None:
        return str(error).replace(f": {error.problem}. {error.remedy}", f": {problem}. {remedy}")
    if value is None or isinstance(value, bool):
        return f"{option}: {problem}. {remedy}"
    return str(InputError(option, value, problem, remedy))


def _blamed(error: InputError | ModelError, options: Mapping[str, str], typed: Mapping[str, Any]) -> tuple[str | None, Any]:
    """The option that an error is about, and its value; None where it is about no option."""
    if isinstance(error, ModelError):
        names = [name for name, value in typed.items() if value == error.model]
        return (options[names[0]] if names else None), error.model
    if error.field == "structured_outputs":
        from outrider.params import StructuredOutputs

        names = [name for name in typed if name in StructuredOutputs.model_fields]
        return (options[names[0]], typed[names[0]]) if len(names) == 1 else (None, error.value)
    for name in (error.field, f"no_{error.field}"):
        if name in typed or (name in options and error.value is None):
            return options[name], error.value
    return None, error.value


def _spelt(text: str, options: Mapping[str, str]) -> str:
    """A text with options in place of settings as Python spells them."""

    def option(found: re.Match[str]) -> str:
        name, value = found[2], found[3].strip("'\"")
        if name not in options:
            return found[0]
        return options[name] if value in ("...", "True") else f"{options[name]} {value}"

    return _SETTING.sub(option, _ALSO_IN_PYTHON.sub("", text))
