"""`outrider quantize`: a checkpoint with rounded weights, which other engines load, too."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import options
from outrider.errors import InvalidParameterError


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

    from outrider.convert.agreement import agreement_of_checkpoint
    from outrider.convert.compressed_tensors import format_of, rounded_layers, write_compressed
    from outrider.convert.rounded_card import rounded_card
    from outrider.kernels.weights import check_groups

    if not Path(model).is_dir():
        raise InvalidParameterError("model", model, "no such folder", "Give the folder of a checkpoint.")
    fmt = format_of(bits, group_size or None)
    content = None if text is None else _read(text)
    layers = rounded_layers(model)
    check_groups(fmt, layers)
    found = None if content is None else agreement_of_checkpoint(model, fmt, layers, content)
    written = write_compressed(model, out, fmt, rounded_card(Path(model).resolve().name, fmt, len(layers), found))
    Console(no_color=no_color or None, highlight=False).print(
        f"{written}: {len(layers)} matrices in {fmt.name}", markup=False, soft_wrap=True
    )


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        remedy = "Give a text file in UTF-8."
        raise InvalidParameterError("text", str(path), f"it cannot be read ({error})", remedy) from error
