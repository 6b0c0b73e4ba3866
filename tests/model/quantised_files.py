"""Quantised checkpoints as others write them, packed number by number as the layouts are published.

- GPTQ: `QuantLinear.pack` of AutoGPTQ, and the two versions of zero points of GPTQModel.
- AWQ: `WQLinear_GEMM.from_linear` of AutoAWQ.
- FP8: `Fp8Quantize` of transformers, whose loading is what its values are compared with.
- compressed-tensors: its own package packs, and says what the numbers stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model import checkpoints

GROUP = 32
#: The outputs whose codes a word of AWQ holds, from its lowest bits on.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Packed = dict[str, Tensor]
Packing = Callable[[Tensor, torch.Generator], tuple[Packed, Tensor]]


def whole_numbers(weight: Tensor, bits: int, group_of: Tensor, random: torch.Generator, *, zeros: bool) -> Any:
    """Codes [out, in], scales [out, groups] in float16, zero points [out, groups], and what they stand for in float64."""
    outputs, groups = len(weight), int(group_of.max()) + 1
    codes = torch.randint(0, 2**bits, weight.shape, generator=random)
    scale = (0.5**bits * (0.5 + torch.rand(outputs, groups, generator=random))).half()
    zero = torch.full((outputs, groups), 2 ** (bits - 1))
    if zeros:
        zero = torch.randint(0, 2**bits, (outputs, groups), generator=random)
    value = (codes - zero[:, group_of]) * scale.double()[:, group_of]
    return codes, scale, zero, value


def words_along_rows(codes: Tensor, bits: int) -> Tensor:
    """Words [n * bits / 32, columns] of codes [n, columns], number by number."""
    each = 32 // bits
    words = torch.zeros(len(codes) // each, codes.shape[1], dtype=torch.int64)
    for row in range(len(codes)):
        words[row // each] |= codes[row].long() << (bits * (row % each))
    return as_int32(words)


def as_int32(words: Tensor) -> Tensor:
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def gptq(bits: int = 4, *, version: int = 1, ordered: bool = False, zeros: bool = True) -> Packing:
    def pack(weight: Tensor, random: torch.Generator) -> tuple[Packed, Tensor]:
        inputs = weight.shape[1]
        group_of = torch.arange(inputs) // GROUP
        if ordered:
            group_of = group_of[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
        codes, scale, zero, value = whole_numbers(weight, bits, group_of, random, zeros=zeros)
        kept = words_along_rows(zero, bits).t().long() & 0xFFFFFFFF
        if version == 1:  # the whole word, so that a zero point of 0 borrows
            kept = (kept - (0x11111111 if bits == 4 else 0x01010101)) & 0xFFFFFFFF
        packed = {"qweight": words_along_rows(codes.t(), bits), "qzeros": as_int32(kept).contiguous()}
        return packed | {"scales": scale.t().contiguous(), "g_idx": group_of.to(torch.int32)}, value

    return pack


def awq(weight: Tensor, random: torch.Generator) -> tuple[Packed, Tensor]:
    group_of = torch.arange(weight.shape[1]) // GROUP
    codes, scale, zero, value = whole_numbers(weight, 4, group_of, random, zeros=True)

    def words(numbers: Tensor) -> Tensor:  # [rows, outputs]
        found = torch.zeros(len(numbers), numbers.shape[1] // 8, dtype=torch.int64)
        for column in range(found.shape[1]):
            for place, output in enumerate(AWQ_ORDER):
                found[:, column] |= numbers[:, 8 * column + output].long() << (4 * place)
        return as_int32(found)

    return {"qweight": words(codes.t()), "qzeros": words(zero.t()), "scales": scale.t().contiguous()}, value


def fp8(block: int | None, scales: torch.dtype = torch.float32) -> Packing:
    """Blocks of `block` rows and columns, or a whole matrix for None. Scales of bytes are exponents."""

    def pack(weight: Tensor, random: torch.Generator) -> tuple[Packed, Tensor]:
        counts = [] if block is None else [-(-size // block) for size in weight.shape]
        scale = 0.02 * (0.5 + torch.rand(counts, generator=random))
        kept = (scale.log2().round() + 127).to(scales) if scales == torch.uint8 else scale.to(scales)
        wide = (kept.float() - 127).exp2() if scales == torch.uint8 else kept.float()
        if block is not None:
            wide = wide.repeat_interleave(block, 0).repeat_interleave(block, 1)[: weight.shape[0], : weight.shape[1]]
        codes = (40 * weight).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": kept}, codes.float() * wide

    return pack


def compressed(
    bits: int, group: int | None, *, symmetric: bool, dtype: torch.dtype, format: str = "pack-quantized"
) -> tuple[Packing, dict[str, Any]]:
    """How the package of compressed-tensors packs, and what it declares in a configuration. Skips where it is missing."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(num_bits=bits, symmetric=symmetric, strategy="group" if group else "channel", group_size=group)
    scheme, compressor = (
        QuantizationScheme(targets=["Linear"], weights=args),
        BaseCompressor.get_value_from_registry(format),
    )

    def pack(weight: Tensor, random: torch.Generator) -> tuple[Packed, Tensor]:
        groups = weight.shape[1] // group if group else 1
        scale = (0.5**bits * (0.5 + torch.rand(len(weight), groups, generator=random))).to(dtype)
        least = -(2 ** (bits - 1))
        zero = torch.randint(least, -least, scale.shape, generator=random).to(torch.int8)
        state = {"weight": weight.to(dtype), "weight_scale": scale, "weight_zero_point": zero * (not symmetric)}
        packed = compressor.compress(state, scheme)
        wide = packed | {"weight_scale": scale.double()}  # so that the package rounds no product
        return packed, compressor.decompress(wide, scheme)["weight"]

    declared = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": scheme.model_dump()}}
    return pack, declared


def write(
    folder: Path, packing: Packing, quantization: dict[str, Any], family: str = "llama", **shape: Any
) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint whose decoder's matrices are quantised, and what these stand for, by the names of the stock weights."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4} | shape
    checkpoints.save(family, folder, **shape)
    tensors, values = load_file(folder / "model.safetensors"), {}
    random = torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight"))]:
        packed, value = packing(tensors.pop(name).float(), random)
        tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in packed.items()}
        values[name] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    declare(folder, quantization_config=quantization)
    return folder, values


def declare(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
