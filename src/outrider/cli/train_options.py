"""Options that all training commands share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from outrider.cli import options

if TYPE_CHECKING:
    from outrider.train.run import Job

Target = Annotated[str | None, typer.Option(help="Folder or hub id; without one, the embedded target.")]
NumDraftTokens = Annotated[int, typer.Option("--num-draft-tokens", "-k", help="Draft tokens that tau is measured for.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object at the end.")]


@dataclass(frozen=True)
class Training:
    """What every training is told; `typer` shows the help that stands beside each."""

    data: Annotated[Path, typer.Option(help="A folder that `outrider train data` has made.")]
    out: Annotated[Path, typer.Option(help="Folder of the result. The same command goes on where it was broken off.")]
    target: Target = None
    loss: Annotated[
        str,
        typer.Option(help="forward_kl, reverse_kl, jsd, total_variation, cross_entropy; some take accepted_length."),
    ] = "forward_kl"
    steps: Annotated[int, typer.Option(help="Steps of the optimiser.")] = 1000
    batch_size: Annotated[int, typer.Option(help="Texts in a batch, on each device.")] = 16
    accumulation: Annotated[int, typer.Option(help="Batches in a step.")] = 1
    length: Annotated[int, typer.Option(help="Longest text in tokens; longer ones are cut.")] = 512
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 1e-3
    seed: Annotated[int, typer.Option(help="Of the order of texts and of what is drawn.")] = 0
    precision: Annotated[
        str | None, typer.Option(help="bf16 or fp32; unless given, bf16 where the processor multiplies it, else fp32.")
    ] = None
    evaluate_every: Annotated[int, typer.Option(help="Steps between measurements on held-out texts.")] = 100
    save_every: Annotated[
        int, typer.Option(help="Most steps between checkpoints; each measurement is followed by one too.")
    ] = 100
    patience: Annotated[int, typer.Option(help="Measurements without a gain that end the training; 0 runs to the end.")] = 0
    engine_every: Annotated[
        int, typer.Option(help="Steps between runs of the real engine; 0 runs it before and after.")
    ] = 0
    engine_prompts: Annotated[int, typer.Option(help="Held-out prompts of such a run; 0 never runs it.")] = 16
    teacher: Annotated[
        str, typer.Option(help="forward runs the target; hidden_states or top_k take what the data hold.")
    ] = "forward"
    dtype: options.DType = "auto"
    activations: options.Activations = None
    as_json: AsJson = False

    def job(self, num_draft_tokens: int) -> Job:
        """The training that is asked for.

        Args:
            num_draft_tokens: Draft tokens that tau is measured for.
        """
        from outrider.train.run import Job
        from outrider.train.settings import TrainSettings

        given = asdict(self) | {"num_draft_tokens": num_draft_tokens}
        settings = {name: given[name] for name in TrainSettings.model_fields.keys() & given.keys()}
        if self.precision is None:
            del settings["precision"]
        places = {name: given[name] for name in ("data", "out", "target", "dtype", "activations")}
        return Job(**places, settings=TrainSettings(**settings))


def with_training(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command that takes the options of `Training` behind its own, and gets them as its first argument.

    Args:
        defaults: Of this command, where they are not those of `Training`.
    """
    names = [field.name for field in fields(Training)]
    hints = get_type_hints(Training, include_extras=True)
    usual = {field.name: defaults.get(field.name, field.default) for field in fields(Training)}
    required = {field.name for field in fields(Training) if field.default is MISSING}

    def parameter(name: str) -> Parameter:
        default = Parameter.empty if name in required else usual[name]
        return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = get_type_hints(command, include_extras=True)
        _, *others = signature(command).parameters.values()

        @wraps(command)
        def run(**given: Any) -> None:
            command(Training(**{name: given.pop(name) for name in names}), **given)

        found = [each.replace(annotation=own[each.name], kind=Parameter.KEYWORD_ONLY) for each in others]
        shared = [parameter(name) for name in names]
        run.__signature__ = Signature([*shared[:3], *found, *shared[3:]])  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in (*found, *shared)} | {"return": None}
        return run

    return decorate
