"""What a verb says in words of its own options: of options and commands of other engines, and of errors that name
settings."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

from outrider.cli.startup import light_imports
from outrider.errors import InputError, InvalidParameterError, ModelError

if TYPE_CHECKING:
    from outrider.config import Frozen

#: Options of outrider serve by the names of options of other engines that mean the same.
_RENAMED = {
    **dict.fromkeys(("--alias", "-a"), "--served-model-name"),
    **dict.fromkeys(("--data-parallel-size", "-dp"), "--replicas"),
    "--chat-template-file": "--chat-template",
    "--reasoning-format": "--reasoning-parser",
    "--ssl-cert-file": "--ssl-certfile",
    "--ssl-key-file": "--ssl-keyfile",
    "--tool-call-parser": "--tool-parser",
}
#: What is said of other options of theirs, {} for the value.
_ANSWERS = {
    "Give the model without an option.": ("--model", "-m", "--hf-repo", "-hf"),
    "Leave it out: it is so without an option.": (
        *("--jinja", "--cont-batching", "-cb", "--metrics", "--enable-prefix-caching", "--enable-chunked-prefill"),
        *("--enable-auto-tool-choice", "--enable-reasoning", "--scheduling-policy"),
    ),
    "Leave it out: what is fastest is chosen.": (
        *("--flash-attn", "-fa", "--mmap", "--no-mmap", "--mlock", "--ubatch-size", "-ub", "--numa", "--prio"),
        *("--enforce-eager", "--block-size", "--compilation-config", "-O", "--swap-space"),
    ),
    "Leave it out: a model lies on one device, and --device chooses it.": (
        *("--gpu-layers", "--n-gpu-layers", "-ngl", "--split-mode", "-sm", "--tensor-split", "-ts", "--main-gpu", "-mg"),
        *("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"),
    ),
    "Leave it out: a draft model lies where the target does.": (
        *("--spec-draft-ngl", "-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft"),
        *("--spec-draft-device", "-devd", "--device-draft"),
    ),
    "Leave it out: a draft ends where it no longer pays.": (
        *("--spec-draft-n-min", "--draft-min", "--draft-n-min", "--spec-ngram-mod-n-min"),
    ),
    "Leave it out: a draft model reads what the target reads.": ("--ctx-size-draft", "-cd"),
    "Leave it out, and use --method suffix: it learns from the texts that are written.": (
        *("--lookup-cache-static", "-lcs", "--lookup-cache-dynamic", "-lcd"),
    ),
    "Use --tree 3,2,1 or best_first for drafts that branch.": ("--spec-draft-p-split", "--draft-p-split"),
    "Leave it out: keys and values have the dtype of the model.": (
        *("--cache-type-k", "-ctk", "--cache-type-v", "-ctv", "--kv-cache-dtype"),
    ),
    "Leave it out: positions are what the model says.": (
        *("--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale", "--hf-overrides"),
    ),
    "Leave it out: texts take what memory is free, or --kv-cache-tokens of outrider serve.": ("--gpu-memory-utilization",),
    "Leave it out: no adapter is applied. Merge it into its model first.": ("--lora", "--enable-lora", "--lora-modules"),
    "Leave it out: only text is read.": ("--mmproj", "-mm", "--limit-mm-per-prompt"),
    "Leave it out: texts are written, and no embeddings.": ("--embedding", "--embeddings", "--reranking", "--task"),
    "Leave it out: outrider chat talks, and outrider generate writes one text.": (
        *("--conversation", "-cnv", "--no-conversation", "-no-cnv", "--single-turn", "-st"),
    ),
    "Leave it out: no code of a model is run. LLM(trust_remote_code=True) of Python runs it.": ("--trust-remote-code",),
    "Set OMP_NUM_THREADS={} in the environment; all cores compute without it.": ("--threads", "-t"),
    "Leave it out: a prompt is computed by as many threads as all else.": ("--threads-batch", "-tb"),
    "Use --allow-origin, once for each address.": ("--allowed-origins",),
    "Set OUTRIDER_API_KEYS in the environment, or use --api-key-file FILE.": ("--api-key",),
}
_ANSWER = {option: answer for answer, options in _ANSWERS.items() for option in options}
#: Options that say how to draft, and a setting of a method may have the name of.
_OF_DRAFTS = re.compile("--(spec|draft|model-draft|mtp)|-(md|hfd)$")
#: vLLM's option for a mapping that says who drafts.
_SPECULATIVE = ("--speculative-config", "-sc")

_OWN_FILES = "Models are your own folders and GGUF files, and hub ids: give one to outrider chat or outrider serve."
#: What does here what commands of Ollama do.
_OF_OLLAMA = {
    "run": "Use outrider chat MODEL, or outrider generate MODEL -p TEXT for one answer.",
    "show": "Use outrider doctor MODEL.",
    **dict.fromkeys(("pull", "push", "create", "list", "ls", "ps", "cp", "rm", "stop"), _OWN_FILES),
}
#: Methods of llama.cpp's kinds of drafting whose heads have a folder.
_WITH_HEADS = ("eagle3", "dflash")


class AnsweringCommand(TyperCommand):
    """A verb that answers options of llama.cpp and vLLM with its own, and whose errors name its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as usual, but for errors where an option is another engine's. `-ngl` may be read as a value of `-n`."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if "UsageError" in (kind.__name__ for kind in type(error).__mro__):  # of a copy of click that typer may bring
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


# --- Options and commands of other engines: the command says what they are called here.


def answer_command(name: str) -> None:
    """Raise InvalidParameterError for a command of Ollama: it says what does the same."""
    if name in _OF_OLLAMA:
        raise InvalidParameterError("command", name, "a command of Ollama", _OF_OLLAMA[name]) from None


def _answer(args: Sequence[str], known: Collection[str]) -> None:
    """Raise InvalidParameterError for those of these options that are llama.cpp's or vLLM's; it answers all of them."""
    answers, values = dict[str, list[str]](), dict[str, str]()
    for place, given in enumerate(args):
        option, has_value, value = given.partition("=")
        if not option.startswith("-") or option in known or option in values:
            continue
        value = value if has_value else next(iter(args[place + 1 :]), "")
        answer = _said_of(option, value, known)
        if answer is not None:
            answers.setdefault(answer, []).append(option)
            values[option] = value
    if not values:
        return
    problem = "an option of llama.cpp or vLLM" if len(values) == 1 else "options of llama.cpp or vLLM"
    remedy, apart = next(iter(answers)), " "
    if len(answers) > 1:  # a line for each answer
        apart = "\n  "
        remedy = apart.join(f"{', '.join(options)}: {answer}" for answer, options in answers.items())
    error = InvalidParameterError(*next(iter(values.items())), problem, remedy)
    error.args = (f"{', '.join(values)}: {problem}.{apart}{remedy}",)  # without values: one may be a key
    raise error


def _said_of(option: str, value: str, known: Collection[str]) -> str | None:
    """What a verb has in place of an option of another engine; None for other options."""
    from outrider.config import Flag, declared

    if option in _SPECULATIVE:
        return _speculation(value, known)
    if option in _RENAMED:
        ours = _RENAMED[option]
        return f"Use {ours} {value}." if ours in known else _alone(ours, ["outrider serve"])
    found = None if option in _ANSWER else _setting(option)
    if found is None:
        return _ANSWER[option].format(value) if option in _ANSWER else None
    owner, name = found
    verbs = [f"outrider {verb}" for field, flag in declared(owner, Flag) if field == name for verb in flag.verbs]
    if verbs and _option(name) not in known:
        return _alone(_option(name), verbs)
    return f"Use {_said_here(owner, name, value, known)}."


def _setting(option: str) -> tuple[type[Frozen], str] | None:
    """The setting that an option of llama.cpp stands for: its owner and its name."""
    from outrider.config import CONFIGS, field_by_option
    from outrider.params import SamplingParams

    found = field_by_option((*CONFIGS, SamplingParams), option)
    if found is not None or not _OF_DRAFTS.match(option):
        return found
    with light_imports():  # settings of methods take seconds to import, which a slip of the pen is not worth
        from outrider.options import named_elsewhere

        return named_elsewhere(option)


def _alone(option: str, verbs: Sequence[str]) -> str:
    return f"Leave it out: {option} is an option of {' and '.join(verbs)} alone."


def _speculation(value: str, known: Collection[str]) -> str:
    """Options that say what vLLM's mapping does; a method's weights say themselves how they draft."""
    with light_imports():
        from outrider.propose.settings import SpeculationConfig

    try:
        given = dict(json.loads(value))
    except (ValueError, TypeError):
        given = {}
    said = [f"--draft-model {given['model']}"] if "model" in given else []
    if not said and "method" in given:
        kind = str(given["method"])
        said = [_said_here(SpeculationConfig, "method", "mtp" if kind.endswith("_mtp") else kind, known)]
    if "num_speculative_tokens" in given:
        said.append(_said_here(SpeculationConfig, "num_draft_tokens", str(given["num_speculative_tokens"]), known))
    return f"Use {' '.join(said) or '--draft-model FOLDER or --method NAME'}."


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _said_here(owner: Any, name: str, value: str, known: Collection[str]) -> str:
    """The option that says the same, of those that a verb has."""
    from outrider.config import CONFIGS
    from outrider.params import SamplingParams

    own = _option(name)
    if owner in (*CONFIGS, SamplingParams):
        return f"{own} {value}"
    from outrider.options import draft_setting

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
