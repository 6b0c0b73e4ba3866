"""Proven requests with every parameter whose effect depends on the path of a row, under every way to draft."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.prove.settings.methods import OTHER, drafted, staged
from outrider.prove.settings.setting import Setting


def _every_other(ids: Tensor, scores: Tensor) -> Tensor:
    """A logits processor whose answer depends on the whole prefix."""
    pushed = scores.clone()
    pushed[:, int(ids.sum()) % scores.shape[-1]] -= 1.5
    return pushed


def stuck_behind(token: int) -> dict[str, Any]:
    """No token may follow `token`."""
    return {"bad_words_ids": tuple((token, other) for other in range(3))}


def _raising(ids: Tensor, scores: Tensor) -> Tensor:
    """A logits processor that forbids one token, ends with another, and raises behind both of them."""
    if int(ids[0, -1]) == 2 and ids.shape[1] > 5:
        raise ValueError("the text has ended here, or has a token that was forbidden")
    return scores if ids.shape[1] % 2 else scores.index_fill(1, torch.tensor([2]), float("-inf"))


#: One setting of every parameter that changes logits and whose effect depends, or may depend, on the path of a row.
PARAMETERS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "presence_penalty": {"presence_penalty": 1.1},
    "frequency_penalty": {"frequency_penalty": -0.6},
    "logit_bias": {"logit_bias": {0: 1.0, 2: -0.7}},
    "bad_words_ids": {"bad_words_ids": ((1, 1), (2, 0), (0,))},
    "allowed_token_ids": {"allowed_token_ids": (0, 2)},
    "logits_processors": {"logits_processors": (_every_other,)},
    "min_tokens": {"stop_token_ids": (1,), "min_tokens": 2},
    "nothing may follow a stop": {"stop_token_ids": (2,), **stuck_behind(2)},
    "a processor that raises behind a stop": {"stop_token_ids": (2,), "logits_processors": (_raising,)},
    "all together": {
        "repetition_penalty": 0.8, "presence_penalty": -0.3, "frequency_penalty": 0.4, "logit_bias": {1: 0.5},
        "bad_words_ids": ((2, 1),), "logits_processors": (_every_other,), "temperature": 1.4, "top_p": 0.95,
    },
}  # fmt: skip

#: Ways to draft, at least one for each rule, with the parameters that each of them needs.
DRAFTED_BY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "block": (drafted("block"), {}),
    "token": (drafted("token"), {}),
    "tree": (drafted("block", tree=(2, 1)), {"max_tokens": 2}),
    "recursive": (drafted("token", tree=(2,)), {"max_tokens": 2}),
    "merged": (drafted("auto", tree=(2,), num_draft_tokens=4) | {"method": "_prove_merged"}, {"max_tokens": 2}),
    "coupled": (drafted("auto"), {"seed": 8}),
    "staged": (staged(OTHER), {}),
    "lookup": ({"method": "ngram", "num_draft_tokens": 2, "min_match": 1}, {}),
}

PARAMETER_SETTINGS = tuple(
    Setting(f"{name}, {way}", speculation, {**asked, **extra})
    for name, asked in PARAMETERS.items()
    for way, (speculation, extra) in DRAFTED_BY.items()
)
