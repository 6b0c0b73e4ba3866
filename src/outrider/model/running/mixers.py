"""RunningMixers: lets the unmodified layers of a transformers model compute over the states of many texts.

The layers of transformers call functions of their module for whatever looks back over the tokens: a convolution, a delta
rule, a scan. These functions know one text without a past. Within our passes such a call is answered for the rows of all
texts, each from its own state; everywhere else the stock function answers, as before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from outrider.model.context import ongoing_context
from outrider.model.running.functions import ANSWERS


class RunningMixers:
    """Watches the layers of a model, until it is removed, so that their calls are answered from their own states.

    Args:
        model: A model of transformers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._hooks: list[Any] = []
        for module in model.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                _answer_calls(sys.modules[type(module).__module__])
                self._hooks.append(module.register_forward_pre_hook(_enter))

    def remove(self) -> None:
        """Watch them no longer."""
        for hook in self._hooks:
            hook.remove()


def _enter(module: Any, _: Any) -> None:
    context = ongoing_context()
    if context is not None and context.running is not None:
        context.running.enter(module.layer_idx)


def _answer_calls(namespace: Any) -> None:
    """Put our answers before the functions of a module of transformers, once."""
    for name, answer in ANSWERS.items():
        stock = getattr(namespace, name, None)
        if stock is not None and not hasattr(stock, "answers_in_passes"):
            setattr(namespace, name, _dispatching(stock, answer))


def _dispatching(stock: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        context = ongoing_context()
        if context is None or context.running is None:
            return stock(*args, **kwargs)
        return answer(context.running, *args, **kwargs)

    dispatch.answers_in_passes = True  # type: ignore[attr-defined]
    return dispatch
