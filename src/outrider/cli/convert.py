"""`outrider convert`: a checkpoint as a file, or a head in a format, that other engines load."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import options
from outrider.errors import ContradictionError, InvalidParameterError


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


def convert(
    model: Annotated[str, typer.Argument(help="Folder of the checkpoint, or of the head.", show_default=False)],
    to: Annotated[FileFormat, typer.Option(help="gguf for a checkpoint; the others for a head.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The file to write, or the folder of the head.", show_default=False)],
    target: Annotated[
        str | None, typer.Option(help="The model that a head was made for, where the head does not name it.")
    ] = None,
    type: Annotated[
        TensorType | None, typer.Option(help="The type of matrices in a file; Q8_0 unless given.", case_sensitive=False)
    ] = None,
    placeholders: Annotated[
        bool, typer.Option("--placeholders", help="Write names without a meaning in place of the vocabulary.")
    ] = False,
    no_color: options.NoColor = False,
) -> None:
    """Write a checkpoint as a file that llama.cpp and its relatives load, with the tokenizer and the chat template; or a
    head of EAGLE or DFlash in the format of speculators or SafeAILab, which vLLM and SGLang load."""
    from rich.console import Console

    if not Path(model).is_dir():
        raise InvalidParameterError("model", model, "no such folder", "Give the folder of a checkpoint.")
    if to is FileFormat.GGUF:
        if target is not None:
            raise ContradictionError("target", target, "a checkpoint is made for no other model", "Leave it out.")
        said = _write_file(model, out, type or TensorType.Q8_0, placeholders)
    elif type is not None or placeholders:
        field, value = ("type", str(type)) if type is not None else ("placeholders", "true")
        raise ContradictionError(field, value, "a head keeps its weights, and has no vocabulary", "Leave it out.")
    else:
        said = _write_head(model, out, to, target)
    Console(no_color=no_color or None, highlight=False).print(said, markup=False, soft_wrap=True)


def _write_file(model: str, out: Path, type: TensorType, placeholders: bool) -> str:
    from outrider.convert.gguf import STORED_AS, write_gguf
    from outrider.convert.gguf_vocabulary import own_vocabulary

    if out.suffix != ".gguf" or out.exists():
        problem = "it is there already" if out.exists() else "its name does not end in .gguf"
        raise InvalidParameterError("out", str(out), problem, "Give the name of a new file, as model.gguf.")
    dtype = next(name for name, stored in STORED_AS.items() if stored == type)
    vocabulary = None if placeholders else own_vocabulary(model)
    written = write_gguf(model, out, dtype, vocabulary)
    return f"{written}: {out.stat().st_size:,} bytes, matrices in {type}"


def _write_head(model: str, out: Path, to: FileFormat, target: str | None) -> str:
    from outrider.convert.head_files import convert_head

    head = convert_head(model, str(to), out, target)
    count = sum(weight.numel() for weight in head.network.state_dict().values())
    return f"{out}: a head of {head.config.method} in the format of {to}, {count:,} weights, all with their bits"
