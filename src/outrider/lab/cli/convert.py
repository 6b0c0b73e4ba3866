"""`outrider convert` and `outrider quantize`: checkpoints and heads for other engines."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options
from outrider.errors import ContradictionError, InvalidParameterError, UnsupportedModelError

if TYPE_CHECKING:
    from outrider.heads.formats.published import PublishedHead

# --- `outrider convert`: a checkpoint as a file, or a head in a format, that other engines load.


class FileFormat(StrEnum):
    """The formats that are written."""

    GGUF = "gguf"
    SPECULATORS = "speculators"
    SAFEAILAB = "safeailab"


class TensorType(StrEnum):
    """The types of matrices in a file. Vectors stay F32."""

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    Q8_0 = "Q8_0"
    Q4_0 = "Q4_0"


class FileParts(StrEnum):
    """What a file holds of a checkpoint with layers that predict several tokens."""

    ALL = "all"
    MODEL = "model"
    LAYERS = "layers"


def convert(
    model: Annotated[str, typer.Argument(help="Folder of the checkpoint, or of the head.", show_default=False)],
    to: Annotated[
        FileFormat,
        typer.Option(help="gguf for a checkpoint or a head of EAGLE-3; the others for a head.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="The file to write, or the folder of the head.", show_default=False)],
    target: Annotated[
        str | None, typer.Option(help="The model that a head was made for, where the head does not name it.")
    ] = None,
    type: Annotated[
        TensorType | None,
        typer.Option(
            help="The type of matrices in a file; Q8_0 unless given. llama-quantize makes Q4_K_M and its like of f16.",
            case_sensitive=False,
        ),
    ] = None,
    placeholders: Annotated[
        bool, typer.Option("--placeholders", help="Write names without a meaning in place of the vocabulary.")
    ] = False,
    mtp: Annotated[
        str | None, typer.Option(help="Folder of layers that predict several tokens, in place of the checkpoint's own.")
    ] = None,
    parts: Annotated[
        FileParts | None,
        typer.Option(help="all of a checkpoint, its model alone, or its layers that predict several tokens alone."),
    ] = None,
    no_color: options.NoColor = False,
) -> None:
    """Write a checkpoint as a file that llama.cpp and its relatives load, with the tokenizer and the chat template; or a
    head of EAGLE or DFlash in the format of speculators or SafeAILab, which vLLM and SGLang load. llama.cpp loads heads of
    EAGLE-3 as files."""
    from rich.console import Console

    from outrider.loading.sources import check_is_folder, check_sources

    check_is_folder("model", model)
    if to is FileFormat.GGUF:
        options.check_installed("convert", ("gguf",), "Run: pip install gguf")
    from outrider.heads.assistant import is_assistant
    from outrider.heads.checkpoint import method_of_heads
    from outrider.heads.formats.published import is_head

    if is_assistant(model):
        raise UnsupportedModelError(model, "assistants are not converted", "Use it as it was published.")
    own = method_of_heads(model)
    if own is not None:
        raise UnsupportedModelError(model, f"no format of another engine has heads of {own}", "Use them as they are.")
    if to is FileFormat.GGUF and not is_head(model):
        if target is not None:
            raise ContradictionError("target", target, "a checkpoint is made for no other model", "Leave it out.")
        check_sources(model=model)
        said = _write_file(model, out, type or TensorType.Q8_0, placeholders, mtp, parts)
    elif type is not None:
        raise ContradictionError("type", str(type), "a head keeps its weights", "Leave it out.")
    elif mtp is not None or parts is not None:
        name, value = ("mtp", mtp) if mtp is not None else ("parts", str(parts))
        raise ContradictionError(name, value, "a head has no layers of a checkpoint", "Leave it out.")
    elif to is FileFormat.GGUF:
        said = _write_head_file(model, out, target, placeholders)
    elif placeholders:
        raise ContradictionError("placeholders", "true", "a head in this format has no vocabulary", "Leave it out.")
    else:
        said = _write_head(model, out, to, target)
    Console(no_color=no_color or None, highlight=False).print(said, markup=False, soft_wrap=True)


def _write_file(
    model: str, out: Path, type: TensorType, placeholders: bool, mtp: str | None, parts: FileParts | None
) -> str:
    from outrider.lab.convert.gguf import STORED_AS, write_gguf
    from outrider.lab.convert.gguf_vocabulary import own_vocabulary
    from outrider.loading.gguf.header import read_gguf

    _check_new(out)
    if mtp is not None and parts is FileParts.MODEL:
        raise ContradictionError("mtp", mtp, "a file of the model alone holds no such layers", "Leave one of them out.")
    dtype = next(name for name, stored in STORED_AS.items() if stored == type)
    vocabulary = None if placeholders else own_vocabulary(model)
    held: Any = None if parts is None else parts.value
    written = write_gguf(model, out, dtype, vocabulary, held, mtp)
    layers = sum(value for key, value in read_gguf(written).metadata.items() if key.endswith(".nextn_predict_layers"))
    said = f", {layers} prediction layer{'s' if layers > 1 else ''}" if layers else ""
    return f"{written}: {out.stat().st_size:,} bytes, matrices in {type}{said}"


def _check_new(out: Path) -> None:
    if out.suffix != ".gguf" or out.exists():
        problem = "it is there already" if out.exists() else "its name does not end in .gguf"
        raise InvalidParameterError("out", str(out), problem, "Give the name of a new file, as model.gguf.")


def _write_head_file(model: str, out: Path, target: str | None, with_placeholders: bool) -> str:
    from outrider.lab.convert.gguf import write_gguf_head
    from outrider.lab.convert.gguf_vocabulary import placeholders

    _check_new(out)
    return _said(out, write_gguf_head(model, out, target, placeholders() if with_placeholders else None), FileFormat.GGUF)


def _write_head(model: str, out: Path, to: FileFormat, target: str | None) -> str:
    from outrider.heads.formats.writing import convert_head

    return _said(out, convert_head(model, str(to), out, target), to)


def _said(out: Path, head: PublishedHead, form: FileFormat) -> str:
    count = sum(weight.numel() for weight in head.network.state_dict().values())
    return f"{out}: a head of {head.config.method} in the format of {form}, {count:,} weights, all with their bits"


# --- `outrider quantize`: a checkpoint with rounded weights, which other engines load, too.


def quantize(
    model: Annotated[str, typer.Argument(help="Folder of the checkpoint.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The folder to write.", show_default=False)],
    bits: Annotated[int, typer.Option(help="4 or 8.")] = 4,
    group_size: Annotated[int, typer.Option(help="Inputs that share a scale: 32, 64 or 128; 0 for all (8 bits).")] = 32,
    text: Annotated[Path | None, typer.Option(help="A text on which the card says what rounding costs.")] = None,
    no_color: options.NoColor = False,
) -> None:
    """Round the weights of a checkpoint, and write them in the format of compressed-tensors with a card."""
    from rich.console import Console

    from outrider.loading.sources import check_is_folder

    check_is_folder("model", model)
    from outrider.kernels.weights import check_groups
    from outrider.lab.convert.compressed_tensors import format_of, rounded_layers, write_compressed
    from outrider.lab.measure.agreement import agreement_of_checkpoint, rounded_card

    fmt = format_of(bits, group_size or None)
    content = None if text is None else read_text(text)
    layers = rounded_layers(model)
    check_groups(fmt, layers)
    found = None if content is None else agreement_of_checkpoint(model, fmt, layers, content)
    written = write_compressed(model, out, fmt, rounded_card(Path(model).resolve().name, fmt, len(layers), found))
    Console(no_color=no_color or None, highlight=False).print(
        f"{written}: {len(layers)} matrices in {fmt.name}", markup=False, soft_wrap=True
    )


def read_text(path: Path) -> str:
    """The content of a file that an option names."""
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        remedy = "Give a text file in UTF-8."
        raise InvalidParameterError("text", str(path), f"it cannot be read ({error})", remedy) from error
