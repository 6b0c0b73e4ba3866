"""The card of a checkpoint with rounded weights."""

from __future__ import annotations

from outrider.kernels.formats.format import WeightFormat
from outrider.measure.agreement import Agreement


def rounded_card(name: str, fmt: WeightFormat, num_layers: int, found: Agreement | None) -> str:
    """What the folder holds, and what rounding costs where that was measured."""
    scales = "a scale for each output" if fmt.group is None else f"a scale for each group of {fmt.group} inputs"
    lines = f"""# {name} in {fmt.name}

The weights of {num_layers} linear layers are rounded to {fmt.bits} bits with {scales}.
Embeddings, norms and the head are those of the original. Activations are not rounded. The scale of a group is the one of a
few candidates that leaves the least squared error, and no text was needed to find it. The format is "pack-quantized" of
compressed-tensors.

## What rounding costs

"""
    if found is None:
        return lines + "This was not measured. `outrider quantize --text FILE` measures it.\n"
    return (
        lines
        + f"""| on a text that the user gave | original | rounded |
|---|---|---|
| perplexity of {found.tokens} tokens | {found.original:.3f} | {found.rounded:.3f} |

The laws of {found.compared} tokens lie {found.distance:.3f} apart on average and {found.worst_distance:.3f} at most (total
variation). The mean divergence of the rounded law from the original one is {found.divergence:.4f} nats. Both hold the same
token likeliest in {found.same_choice:.1%} of all places.
"""
    )
