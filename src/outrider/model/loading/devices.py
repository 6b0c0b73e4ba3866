"""Names of devices: which of them can be used here."""

from __future__ import annotations

from textwrap import shorten

import torch

from outrider.errors import ContradictionError, InvalidParameterError


def usable_device(name: str | None) -> torch.device:
    """The device of that name; for None the CPU: a GPU is taken where the caller asks for it, since none was measured yet.

    Raises:
        InvalidParameterError: It cannot hold a tensor here.
    """
    name = "cpu" if name is None else name
    try:
        device = torch.device(name)
        torch.empty(1, device=device).sum().item()  # a device without numbers, as "meta", is none
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = shorten(str(error).splitlines()[0], 160, placeholder=" ...")
        raise InvalidParameterError("device", name, f"it cannot be used here ({reason})", _device_remedy(name)) from error
    return device


def check_invariant(batch_invariant: bool, device: torch.device) -> None:
    """Raise ContradictionError where bits that do not depend on the batch are wanted of a GPU."""
    if batch_invariant and device.type == "cuda":
        raise ContradictionError(
            "batch_invariant",
            batch_invariant,
            f"on {device} PyTorch adds up a row, as norms do, in an order that depends on the number of rows",
            'Use device="cpu", or leave batch_invariant out.',
        )


def _device_remedy(name: str) -> str:
    """What can be used here; and where CUDA is missing from PyTorch, that no driver would help."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        return f"Use cpu or {'cuda' if count == 1 else f'cuda:0 to cuda:{count - 1}'}."
    if name.startswith("cuda") and not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return "Use cpu, or install a PyTorch that is built for CUDA."
    return "Use cpu."
