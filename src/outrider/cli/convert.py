"""`outrider convert`: a checkpoint as a file that other engines load."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import options
from outrider.errors import InvalidParameterError


class FileFormat(StrEnum):
    """The formats of files that are written."""

    GGUF = "gguf"


class TensorType(StrEnum):
    """The types of matrices in a file. Vectors stay F32."""

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    Q8_0 = "Q8_0"
    Q4_0 = "Q4_0"


def convert(
    model: Annotated[str, typer.Argument(help="Folder of the checkpoint.", show_default=False)],
    to: Annotated[FileFormat, typer.Option(help="The format of the file.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The file to write.", show_default=False)],
    type: Annotated[TensorType, typer.Option(help="The type of matrices.", case_sensitive=False)] = TensorType.Q8_0,
    placeholders: Annotated[
        bool, typer.Option("--placeholders", help="Write names without a meaning in place of the vocabulary.")
    ] = False,
    no_color: options.NoColor = False,
) -> None:
    """Write a checkpoint as a file that llama.cpp and its relatives load, with the tokenizer and the chat template."""
    from rich.console import Console

    from outrider.convert.gguf import STORED_AS, write_gguf
    from outrider.convert.gguf_vocabulary import own_vocabulary

    assert to is FileFormat.GGUF, "no other format is written"
    if not Path(model).is_dir():
        raise InvalidParameterError("model", model, "no such folder", "Give the folder of a checkpoint.")
    if out.suffix != ".gguf" or out.exists():
        problem = "it is there already" if out.exists() else "its name does not end in .gguf"
        raise InvalidParameterError("out", str(out), problem, "Give the name of a new file, as model.gguf.")
    dtype = next(name for name, stored in STORED_AS.items() if stored == type)
    vocabulary = None if placeholders else own_vocabulary(model)
    written = write_gguf(model, out, dtype, vocabulary)
    Console(no_color=no_color or None, highlight=False).print(
        f"{written}: {out.stat().st_size:,} bytes, matrices in {type}", markup=False, soft_wrap=True
    )
