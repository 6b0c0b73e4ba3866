"""`outrider train`: the target writes data, and draft models or heads learn from it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options
from outrider.cli.elsewhere import AnsweringCommand
from outrider.cli.flags import option, with_options
from outrider.errors import InvalidParameterError
from outrider.lab.cli.progress import shown_progress

if TYPE_CHECKING:
    from outrider.lab.train.run import Job, Outcome, Size
    from outrider.lab.train.trainer import Watcher

# --- Options that all training commands share.


Target = Annotated[str | None, typer.Option(help="Folder or hub id; without one, the embedded target.")]
NumDraftTokens = Annotated[int, typer.Option("--num-draft-tokens", "-k", help="Draft tokens that tau is measured for.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object at the end.")]


@dataclass(frozen=True)
class Training:
    """Holds what every training is told; `typer` shows the help that stands beside each."""

    data: Annotated[Path, typer.Option(help="A folder that `outrider train data` has made.")]
    out: Annotated[Path, typer.Option(help="Folder of the result. The same command goes on where it was broken off.")]
    target: Annotated[
        str | None, typer.Option(help="Folder or hub id; without one, the target that the manifest of the data names.")
    ] = None
    loss: Annotated[
        str, typer.Option(help="forward_kl, reverse_kl, jsd, total_variation, cross_entropy; some take accepted_length.")
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
    dtype: Annotated[str, option("outrider.config:ModelConfig", "dtype")] = "auto"
    activations: Annotated[str | None, option("outrider.config:ModelConfig", "activations")] = None
    as_json: AsJson = False

    def job(self, num_draft_tokens: int) -> Job:
        """The training that is asked for."""
        from outrider.lab.train.run import Job
        from outrider.lab.train.settings import TrainSettings

        given = asdict(self) | {"num_draft_tokens": num_draft_tokens}
        settings = {name: given[name] for name in TrainSettings.model_fields.keys() & given.keys()}
        if self.precision is None:
            del settings["precision"]
        places = {name: given[name] for name in ("data", "out", "target", "dtype", "activations")}
        return Job(**places, settings=TrainSettings(**settings))


#: A command that takes the options of `Training` around its own, and its own defaults for them.
with_training = partial(with_options, 3)


# --- The commands.


app = typer.Typer(
    add_completion=False,
    help="Train what drafts for a target: `data` first, then a draft model (`distill`), or heads by their method.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
)


@app.command(cls=AnsweringCommand)
@with_options()
def data(
    prompts: Annotated[Path, typer.Option(help="A .jsonl file of prompts or conversations, a text, or a folder of these.")],
    out: Annotated[Path, typer.Option(help="Folder of the data. The same command goes on where it was broken off.")],
    target: Target = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens behind a prompt; 0 keeps the prompts alone.")] = 128,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the prompts that texts are cut into.")] = 64,
    samples: Annotated[int, typer.Option(help="Texts for each prompt.")] = 1,
    limit: Annotated[int | None, typer.Option(help="Most prompts.", min=1)] = None,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="As in serving; 0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="As in serving; 0 keeps all tokens.")] = 0,
    top_p: Annotated[float, typer.Option(help="As in serving.")] = 1.0,
    held_out: Annotated[float, typer.Option(help="Share of the prompts that is kept for measurements.")] = 0.05,
    hidden_states: Annotated[
        list[int] | None, typer.Option(help="Keep the input of this layer, or what the last one leaves; may be repeated.")
    ] = None,
    target_top_k: Annotated[int, typer.Option(help="Keep the target's likeliest next tokens and their logits.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the texts.")] = 0,
    *,
    loading: options.Loading,
    as_json: AsJson = False,
) -> None:
    """Let the target write training data on your prompts."""
    given = locals()
    from rich.console import Console

    from outrider.lab.train.collect import collect, read_sources
    from outrider.records import DataSettings

    asked = {name: value for name, value in given.items() if name in DataSettings.model_fields}
    settings = DataSettings(**{**asked, "hidden_states": tuple(hidden_states or ())})
    sources = read_sources(prompts, without=out)
    console = Console(stderr=True, highlight=False)
    with shown_progress(console) as progress:
        found = collect(
            sources,
            out,
            settings,
            target=target,
            **loading,
            limit=limit,
            on_progress=lambda done, total: progress.tell("texts", done, total),
            on_size=lambda size: console.print(f"up to {size / 2**20:,.1f} MiB will be added to {out}", soft_wrap=True),
        )
    for where, why in found.refused[:5]:
        console.print(f"left out: {where}: {why}", markup=False)
    manifest = found.manifest
    counts = {
        "texts": manifest.num_records,
        "tokens": manifest.num_tokens,
        "held_out": manifest.num_held_out,
        "written_now": found.num_written,
        "left_out": len(found.refused),
    }
    if as_json:
        sys.stdout.write(json.dumps(counts) + "\n")
    else:
        Console(highlight=False).print(", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in counts.items()))


@app.command(cls=AnsweringCommand)
@with_training(lr=2e-3)
def distill(
    training: Training,
    shape: Annotated[str | None, typer.Option(help="Begin from scratch: LAYERSxWIDTH[:FEED_FORWARD], like 2x192.")] = None,
    prune: Annotated[str | None, typer.Option(help="Begin with some of the target's layers, like 0,3,7.")] = None,
    init: Annotated[str | None, typer.Option(help="Begin with this draft model.")] = None,
    sizes: Annotated[str | None, typer.Option(help="Compare shapes instead: 2x128,2x192,4x256.")] = None,
    timed_target: Annotated[
        str | None, typer.Option(help="With --sizes: time the passes of this target, which has the same tokens.")
    ] = None,
    on_policy: Annotated[float, typer.Option(help="Share of the batches whose texts the draft itself writes.")] = 0.0,
    num_draft_tokens: NumDraftTokens = 5,
) -> None:
    """Distil the target into a draft model; with --sizes, find out which size pays most on this machine."""
    check_installed()
    from outrider.lab.train.distill import DistillSettings, parse_shape
    from outrider.lab.train.run import train_draft

    job = training.job(num_draft_tokens)
    learning = DistillSettings(loss=training.loss, on_policy=on_policy)  # type: ignore[arg-type]
    if sizes is not None:
        _compare(job, learning, sizes, timed_target, shape or prune or init, as_json=training.as_json)
        return
    if timed_target is not None:
        raise InvalidParameterError(
            "timed_target", timed_target, "nothing is timed without sizes", "Add --sizes, or leave it out."
        )
    begun = None if shape is None else parse_shape(shape)
    with watching(training.steps) as watcher:
        outcome = train_draft(job, learning, shape=begun, prune=_numbers("prune", prune), init=init, watcher=watcher)
    show(outcome, training.out, as_json=training.as_json)


def _own(kind: Any, says: str, default: Any = None) -> tuple[Any, Any]:
    """An option of some methods: its type with its help, and its default."""
    return Annotated[kind, typer.Option(help=says)], default


def _heads_command(method: str, says: str, loss: str = "forward_kl", **own: tuple[Any, Any]) -> Any:
    """A command that trains heads on the frozen target, with these options beside those of every training, among which the
    loss has this default."""

    def train(training: Training, **given: Any) -> None:
        check_installed()
        from outrider.lab.train.run import head_learning, train_heads

        usual = given["heads"] if "heads" in given else max(1, given.get("block_size", 0) - (method == "dflash"))
        usual = min(usual, 32)  # more are not measured
        job = training.job(given.pop("num_draft_tokens", usual))
        asked = {name: _numbers(name, value) if name == "layers" else value for name, value in given.items()}
        heads = head_learning(method, {"loss": training.loss, **asked})
        with watching(training.steps) as watcher:
            outcome = train_heads(job, heads, watcher=watcher)
        show(outcome, training.out, as_json=training.as_json)

    options = [Parameter(name, Parameter.KEYWORD_ONLY, default=default) for name, (_, default) in own.items()]
    train.__name__, train.__doc__ = method, says
    train.__annotations__ = {"training": Training} | {name: kind for name, (kind, _) in own.items()}
    train.__signature__ = Signature([Parameter("training", Parameter.KEYWORD_ONLY), *options])  # type: ignore[attr-defined]
    return app.command(name=method, cls=AnsweringCommand)(with_training(loss=loss)(train))


_HEADS = _own(int, "Tokens ahead that they guess.", 4)
_LAYER = _own(int | None, "They read what the first so many layers leave; all unless given.")
_UNROLL = _own(int, "Draft tokens behind each token of a text that it learns.", 4)
_FEED_FORWARD = _own(int | None, "Units of its layers; the target's unless given.")
_DRAFT_VOCAB = _own(int, "Most tokens that it drafts: the data's most frequent ones.", 32000)
_LENGTH = (NumDraftTokens, 5)
_INIT = _own(str | None, "Begin with the head in this folder or GGUF file, whose shape and tokens stay.")

medusa = _heads_command(
    "medusa",
    "Train residual heads on the frozen target (Cai et al. 2024).",
    heads=_HEADS,
    blocks=_own(int, "Residual blocks in each head.", 1),
    width=_own(int | None, "Of the blocks; the target's hidden size unless given."),
    output=_own(str, "own: an output layer in each head; target: the target's, frozen.", "own"),
    layer=_LAYER,
)
blockwise = _heads_command(
    "blockwise",
    "Train heads behind one hidden layer, with the target's output layer (Stern et al. 2018).",
    heads=_HEADS,
    inner=_own(int | None, "Hidden units for each head; the target's size unless given."),
    layer=_LAYER,
)
exit_ = _heads_command(
    "exit",
    "Train a head with which the target's first layers draft (Elhoushi et al. 2024).",
    layer=_own(int | None, "It reads what the first so many layers leave; a quarter unless given."),
    width=_own(int | None, "Of what its output layer reads; the target's size unless given."),
    output=_own(str, "own: an output layer of its own; target: the target's, frozen.", "own"),
    num_draft_tokens=_LENGTH,
)
eagle3 = _heads_command(
    "eagle3",
    "Train a layer that continues the frozen target's features (EAGLE-3, Li et al. 2025).",
    init=_INIT,
    layers=_own(str | None, "It reads what enters these layers; 2,n/2,n-3 of n unless given."),
    draft_vocab=_DRAFT_VOCAB,
    unroll=_UNROLL,
    feed_forward=_FEED_FORWARD,
    num_draft_tokens=_LENGTH,
)
eagle1 = _heads_command(
    "eagle1",
    "Train a layer that continues what the target's final norm leaves (EAGLE, Li et al. 2024).",
    init=_INIT,
    unroll=_UNROLL,
    feed_forward=_FEED_FORWARD,
    num_draft_tokens=_LENGTH,
)
mtp = _heads_command(
    "mtp",
    "Train an extra layer, or those that the target's checkpoint carries (Gloeckle et al. 2024; DeepSeek-V3).",
    init=_own(str | None, "Begin with the layers in this folder; the target's own unless given, or else a new one."),
    unroll=_UNROLL,
    num_draft_tokens=_LENGTH,
)
_BLOCK: dict[str, Any] = {
    "init": _INIT,
    "layers": _own(str | None, "It reads what enters these layers; up to five unless given."),
    "own_layers": _own(int, "Layers of its own.", 2),
    "mask_token": _own(int | None, "Stands for tokens to be drafted; the rarest of the data unless given."),
    "blocks": _own(int, "Most blocks of a text in a batch.", 32),
    "draft_vocab": _DRAFT_VOCAB,
    "feed_forward": _FEED_FORWARD,
}
dflash = _heads_command(
    "dflash",
    "Train layers that draft a block of tokens in one pass (DFlash, 2026).",
    block_size=_own(int, "Rows of a block: it drafts one token less in a pass.", 8),
    **_BLOCK,
)
dspark = _heads_command(
    "dspark",
    "Train layers that draft a block in one pass, and heads that choose its tokens in turn (DSpark, Cheng et al. 2026).",
    loss="total_variation",
    block_size=_own(int, "Rows of a block: it drafts as many tokens in a pass.", 7),
    markov_rank=_own(int, "Width of the head by which the token before a place biases it.", 256),
    markov_head=_own(
        str, "vanilla: it reads that token; gated: the state of the place, too; rnn: all tokens before.", "vanilla"
    ),
    confidence=_own(bool, "Whether it learns how likely the token of a place stands.", True),
    cross_entropy=_own(float, "Share of the loss that cross entropy has.", 0.1),
    **_BLOCK,
)


def _numbers(field: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidParameterError(field, text, "not a list of layer numbers", "Use a form like 0,3,7.") from None


def _compare(job: Job, learning: Any, sizes: str, timed_target: str | None, other: str | None, *, as_json: bool) -> None:
    from outrider.lab.train.distill import parse_shape
    from outrider.lab.train.run import compare_sizes

    if other is not None:
        raise InvalidParameterError("sizes", sizes, "the shapes to compare are given", "Leave out shape, prune and init.")
    shapes = [parse_shape(text) for text in dict.fromkeys(sizes.split(","))]
    with watching(job.settings.steps * len(shapes)) as watcher:
        found = compare_sizes(job, learning, shapes, timed_target=timed_target, watch=lambda _: watcher)
    if as_json:
        sys.stdout.write(json.dumps([vars(size) | {"shape": str(size.shape)} for size in found]) + "\n")
    else:
        _show_sizes(found)


def _show_sizes(found: list[Size]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("shape", "parameters", "acceptance", "draft pass", "target pass", "best length", "tau", "speedup")
    for size in found:
        table.add_row(
            str(size.shape),
            f"{size.parameters:,}",
            f"{size.acceptance:.3f}",
            f"{size.draft_seconds * 1e3:.2f} ms",
            f"{size.target_seconds[1] * 1e3:.2f} ms",
            str(size.num_draft_tokens),
            f"{size.tau:.2f}",
            f"{size.speedup:.2f}x",
        )
    console = Console(highlight=False)
    console.print(table)
    best = found[0]
    if best.speedup > 1:
        console.print(f"{best.shape} pays most here: {best.speedup:.2f}x of plain decoding is expected of it.")
    else:
        console.print("None of these pays here: the target's own pass is too cheap beside theirs.")


# --- What training commands show: bars, measurements and the end.


def check_installed() -> None:
    """Raise MissingExtraError where the packages for training are missing."""
    options.check_installed("train", ("accelerate", "matplotlib"), "Install outrider[train].")


def show(outcome: Outcome, out: Path, *, as_json: bool) -> None:
    from accelerate import PartialState
    from rich.console import Console

    if not PartialState().is_main_process:  # the others have written nothing
        return
    if as_json:
        sys.stdout.write(json.dumps(outcome.figures()) + "\n")
        return
    before, best = outcome.before, outcome.best
    console = Console(highlight=False)
    pairs = zip(before.acceptance, best.acceptance, strict=True)
    console.print("acceptance on held-out texts: " + ", ".join(f"{a:.3f} -> {b:.3f}" for a, b in pairs))
    if outcome.stats is not None:
        began = "" if before.engine_tau is None else f" (before: {before.engine_tau:.2f})"
        console.print(f"tokens of a target pass in the engine: {outcome.stats.mean_acceptance_length:.2f}{began}")
    console.print(f"written to {out}; its README.md says what was measured", soft_wrap=True)


@contextmanager
def watching(steps: int) -> Iterator[Watcher]:
    """A watcher that shows a bar, and a line for each measurement, on the error stream."""
    from rich.console import Console

    from outrider.lab.train.trainer import Watcher

    console = Console(stderr=True, highlight=False)
    with shown_progress(console) as progress:

        class Shown(Watcher):
            done = 0

            def on_resume(self, step: int) -> None:
                console.print(f"The training that was broken off goes on after step {step}.")

            def on_step(self, step: int, loss: float) -> None:
                self.done += 1
                progress.tell(f"step {step}, loss {loss:.3f}", max(self.done, step), steps)

            def on_measurement(self, measurement: Any) -> None:
                shares = " ".join(f"{share:.3f}" for share in measurement.acceptance)
                engine = "" if measurement.engine_tau is None else f", in the engine {measurement.engine_tau:.2f}"
                loss = f"loss {measurement.loss:.3f}, " if measurement.step else ""  # nothing was learnt before a step
                said = f"{loss}acceptance {shares}, tau {measurement.tau:.2f}{engine}"
                console.print(f"step {measurement.step}: {said}", soft_wrap=True)

        try:
            yield Shown()
        except KeyboardInterrupt:
            console.print("The training has stopped. The same command goes on from the last checkpoint.")
            raise
