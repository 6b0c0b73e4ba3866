"""Which layout a checkpoint has, by what transformers' configuration declares; or a refusal that says what to use."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import Any

from outrider.errors import UnsupportedModelError
from outrider.model.loading.quantised.awq import Awq
from outrider.model.loading.quantised.compressed import Compressed
from outrider.model.loading.quantised.fp8 import Fp8
from outrider.model.loading.quantised.gptq import Gptq
from outrider.model.loading.quantised.layout import Layout

_ORIGINAL = 'Give the original checkpoint; quantization="int8" or "int4" rounds it while it is loaded.'
_KNOWN = "Give a checkpoint of compressed-tensors (pack-quantized or int-quantized), GPTQ, AWQ or FP8, or the original one."
#: The formats of compressed-tensors with whole numbers.
_WHOLE = ("pack-quantized", "int-quantized", "naive-quantized")


def layout_of(model: str, hf_config: Any) -> Layout | None:
    """The layout of a checkpoint's matrices. None where they are not quantised.

    Raises:
        UnsupportedModelError: They are quantised in a way that is not loaded here.
    """
    found = declared(hf_config)
    if found is None:
        return None
    method = str(getattr(found.get("quant_method"), "value", found.get("quant_method"))).lower()
    if method == "compressed-tensors":
        return _compressed(model, found)
    if method in ("gptq", "awq"):
        bits = _whole(model, found, "bits", 4)
        return _gptq(model, found, bits) if method == "gptq" else _awq(model, found, bits)
    if method == "fp8":
        return Fp8(_block(model, found))
    remedy = _ORIGINAL if method.startswith("bitsandbytes") else _KNOWN
    raise UnsupportedModelError(model, f"its weights are quantised by {method}, which is not supported", remedy)


def declared(hf_config: Any) -> Mapping[str, Any] | None:
    """What a configuration says of quantised weights; None where it says nothing."""
    found = getattr(hf_config, "quantization_config", None)
    if found is None or isinstance(found, Mapping):
        return found
    as_dict: Mapping[str, Any] = found.to_dict()
    return as_dict


def rounded_while_computing(hf_config: Any) -> list[str]:
    """What a configuration wants rounded in every pass beside the weights, which is not done here."""
    found = declared(hf_config) or {}
    wanted = {name for group in _groups(found) for name in ("input_activations", "output_activations") if group.get(name)}
    return sorted(wanted | {name for name in ("activation_scheme", "kv_cache_scheme") if found.get(name)})


def _gptq(model: str, found: Mapping[str, Any], bits: int) -> Gptq:
    version = str(found.get("checkpoint_format") or "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise UnsupportedModelError(model, f"its weights are in the layout {version} of GPTQ", _KNOWN)
    return Gptq(bits, first_version=version == "gptq")


def _awq(model: str, found: Mapping[str, Any], bits: int) -> Awq:
    version = str(found.get("version") or found.get("checkpoint_format") or "gemm").lower()
    if version != "gemm":
        raise UnsupportedModelError(
            model, f"its weights are in the layout {version} of AWQ", "Give one in the layout gemm."
        )
    return Awq(bits)


def _compressed(model: str, found: Mapping[str, Any]) -> Compressed:
    formats = {str(group.get("format") or found.get("format")) for group in _groups(found)} or {str(found.get("format"))}
    unknown = sorted(formats - set(_WHOLE))
    if unknown:
        problem = f"its weights are in the format {unknown[0]} of compressed-tensors, which is not supported"
        raise UnsupportedModelError(model, problem, _KNOWN)
    return Compressed()


def _block(model: str, found: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of the blocks of FP8; None where each matrix has one scale."""
    block = found.get("weight_block_size")
    if block is None:
        return None
    try:
        rows, columns = (index(size) for size in block)
    except (TypeError, ValueError):
        rows = columns = 0
    if min(rows, columns) < 1:
        problem = f"its quantization_config says weight_block_size={block!r}, and two whole numbers from 1 on are wanted"
        raise UnsupportedModelError(model, problem, "Correct config.json, or get the checkpoint again.")
    return rows, columns


def _groups(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What compressed-tensors' configuration says of groups of layers."""
    groups = found.get("config_groups")
    return [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []


def _whole(model: str, found: Mapping[str, Any], name: str, default: int) -> int:
    value = found.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        problem = f"its quantization_config says {name}={value!r}, which is no whole number"
        raise UnsupportedModelError(model, problem, "Correct config.json, or get the checkpoint again.")
    return value
