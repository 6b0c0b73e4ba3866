"""Stock models of float64 that compute in float64 throughout."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Double(TorchFunctionMode):
    """Leaves tensors of float64 as they are where a model's code asks for float32.

    transformers computes norms, some rotary embeddings and the softmax of its own attention in float32, whatever the dtype
    of the model. Within this mode a model of float64 can be compared with ours at the precision of float64.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wide = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64
        asked = kwargs.get("dtype", args[1] if len(args) > 1 and func is torch.Tensor.to else None)
        if wide and (func is torch.Tensor.float or (func is torch.Tensor.to and asked is torch.float32)):
            return args[0]
        if wide and func is torch.nn.functional.softmax and asked is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
