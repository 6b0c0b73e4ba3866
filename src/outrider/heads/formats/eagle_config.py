"""What files of NVIDIA, and some of SpecForge, nest in `eagle_config`: layers of the target, and flags.

The layers are those whose *outputs* are read, counted from 0. The trainers of both count so, and so does SGLang. A vLLM
that knows only layers at the top reads the usual ones instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.heads.formats.layer import AUX_LAYERS, read_layer_ids, refused

NESTED = "eagle_config"
#: Fields that describe parts which heads of one layer do not have, and the layers themselves.
_READ = frozenset({AUX_LAYERS, "next_layer_regular", "parallel_draft_heads_num_layers"})
#: Other fields, and the value with which each of them changes nothing; so do false, 0 and null of those not named here.
_IDLE = {"use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True}
_OTHER = "Use another head."


def read_aux_layers(folder: str, mapping: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The layers of the target whose inputs a head reads; None for those that its method names.

    Raises:
        ModelLoadError: They are no layers, two places disagree, or the head computes what is not computed here.
    """
    top = None if mapping.get(AUX_LAYERS) is None else read_layer_ids(folder, mapping[AUX_LAYERS])
    nested = mapping.get(NESTED)
    if nested is None:
        return top
    if not isinstance(nested, Mapping):
        raise refused(folder, NESTED, nested, "no mapping", _OTHER)
    _check_rest(folder, nested)
    if not nested.get(AUX_LAYERS):
        return top
    inputs = tuple(i + 1 for i in read_layer_ids(folder, nested[AUX_LAYERS], f"{NESTED}.{AUX_LAYERS}"))
    if top is not None and top != inputs:
        problem = f"{AUX_LAYERS}={list(top)} beside it names the inputs of layers, which are the outputs of others"
        remedy = "Keep the one that the head was trained with."
        raise refused(folder, f"{NESTED}.{AUX_LAYERS}", nested[AUX_LAYERS], problem, remedy)
    return inputs


def _check_rest(folder: str, nested: Mapping[str, Any]) -> None:
    """Raise ModelLoadError for a field that changes what the head computes in a way that is not read here."""
    for name, value in nested.items():
        if name in _READ or value is None or value == _IDLE.get(name, False) or (name, value) == ("parallel_draft_step", 1):
            continue
        raise refused(folder, f"{NESTED}.{name}", value, "this version does not compute it", _OTHER)
