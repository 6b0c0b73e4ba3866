"""From a loaded model to a runner: the first backend that drives it exactly, and its KV memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.config import CacheConfig, SchedulerConfig
from outrider.errors import ModelLoadError, UnsupportedModelError
from outrider.kernels.library import kernel_library
from outrider.kernels.linear import use_packed_linear, use_stock_linear
from outrider.loading import hf_modules
from outrider.loading.exclusive import check_wanted, exclusive_transformers
from outrider.loading.loaded_model import LoadedModel
from outrider.model import hf
from outrider.model.attention import AttentionBackend, GatherAttention, PagedAttention, RowByRowAttention
from outrider.model.fused import FusedDecoder
from outrider.model.keeping import keep_reference, read_reference
from outrider.model.memory import NOTHING, Beside, TextBytes, make_blocks
from outrider.model.probe import probe, probe_bits, reference
from outrider.model.runner import ModelRunner

logger = logging.getLogger(__name__)

BACKENDS: dict[str, type[AttentionBackend]] = {
    backend.name: backend for backend in (FusedDecoder, PagedAttention, GatherAttention, RowByRowAttention)
}
#: What "auto" tries, in this order.
AUTO = ("fused", "paged", "gather")
#: What it tries in batch-invariant mode: backends whose bits may not depend on the batch.
INVARIANT = ("fused", "paged", "row_by_row")


@exclusive_transformers()  # its probes run modules of transformers, which read the default dtype
def make_runner(
    loaded: LoadedModel,
    attention_backend: str,
    cache: CacheConfig,
    scheduling: SchedulerConfig,
    *,
    batch_invariant: bool = False,
    beside: Beside = NOTHING,
) -> ModelRunner:
    """Choose a backend by probing, size the KV memory from what the probe wrote, and put the runner together.

    Args:
        scheduling: Sequences that run at a time, and rows of a pass, to bound what is kept of them.
        batch_invariant: Whether the backend must also reproduce its own bits, however rows are batched.
    """
    if loaded.long_rope_after is not None:
        hf.split_rotary_regimes(loaded.model, loaded.long_rope_after)
    ways, known = ways_of(attention_backend, loaded.device, batch_invariant=batch_invariant), read_reference(loaded)
    if known is not None:  # where the first way does not agree with it, nothing is believed that was kept
        found, _ = _first_fitting(loaded, ways[:1], known.logits, bits=batch_invariant)
        if found is not None:
            return _runner(loaded, *found, cache, scheduling, beside)
    stock = reference(loaded)
    check_numbers(loaded.name, loaded.model, stock.logits)
    if not stock.is_causal:
        raise UnsupportedModelError(
            loaded.name,
            "its tokens see those that come after them, so it is an encoder",
            "Use a causal decoder; for masked models there is nothing to speculate on.",
        )
    found, failures = _first_fitting(loaded, ways, stock.logits, bits=batch_invariant)
    if found is not None:
        if not failures:
            keep_reference(loaded, stock)
        return _runner(loaded, *found, cache, scheduling, beside)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
    remedy = "Report it." if attention_backend == "auto" else "Use attention_backend='auto', or report it."
    raise UnsupportedModelError(loaded.name, f"no attention backend reproduces its forward pass ({reasons})", remedy)


def _first_fitting(
    loaded: LoadedModel, ways: Sequence[tuple[str, bool]], want: Tensor, *, bits: bool
) -> tuple[tuple[AttentionBackend, TextBytes] | None, dict[str, str]]:
    """The first way that drives the model, and why those before it do not, by the names of backends."""
    failures: dict[str, str] = {}
    for name, packed in ways:
        check_wanted()
        try:
            return _install(loaded, name, want, packed=packed, bits=bits), failures
        except Exception as error:  # whatever the model's own code raises decides against this backend
            logger.info("attention backend %s (packed: %s) does not fit %s: %s", name, packed, loaded.name, error)
            failures[name] = str(error).splitlines()[0] if str(error) else type(error).__name__
    return None, failures


def _runner(
    loaded: LoadedModel,
    backend: AttentionBackend,
    taken: TextBytes,
    cache: CacheConfig,
    scheduling: SchedulerConfig,
    beside: Beside,
) -> ModelRunner:
    blocks = make_blocks(loaded, cache, scheduling, taken, beside)
    return ModelRunner(loaded, backend, blocks, taken.by_text, taken.by_token)


def ways_of(choice: str, device: torch.device, *, batch_invariant: bool) -> list[tuple[str, bool]]:
    """Backends to try, each with linear layers and experts over packed weights first, where there are kernels, then with
    stock ones: a model that reads its weights past its layers would find none in a packed one. The kernels are for CPUs."""
    names = (INVARIANT if batch_invariant else AUTO) if choice == "auto" else (choice,)
    packed = (False,) if kernel_library() is None or device.type != "cpu" else (True, False)
    return [(name, p) for name in names for p in ((False,) if name == FusedDecoder.name else packed)]


def _install(
    loaded: LoadedModel, name: str, want: Tensor, *, packed: bool, bits: bool
) -> tuple[AttentionBackend, TextBytes]:
    """One way to drive the model, probed; it leaves no trace where it fails."""
    backend = BACKENDS[name]()
    library = kernel_library()
    try:
        if packed and library is not None:
            use_packed_linear(loaded.model, library, hf_modules.TRANSPOSED_LINEARS)
            hf_modules.use_packed_experts(loaded.model, library)
        taken = probe(loaded, backend, want)
        _settle_bits(loaded, backend, asked=bits)
    except Exception:
        backend.uninstall()
        use_stock_linear(loaded.model)
        hf_modules.use_stock_experts(loaded.model)
        raise
    return backend, taken


def _settle_bits(loaded: LoadedModel, backend: AttentionBackend, *, asked: bool) -> None:
    """Find out whether bits are a function of the text; raises ValueError where they are not, and this was asked for."""
    if asked and not (backend.invariant or backend.may_be_invariant):
        raise ValueError("its bits depend on the batch")
    if not (asked or backend.may_be_invariant):
        return
    try:
        probe_bits(loaded, backend)
    except ValueError as error:
        if asked:
            raise
        logger.info("backend %s under %s: %s", backend.name, loaded.name, error)
    else:
        backend.invariant = True


# --- Finds the weights on account of which a model's logits are no numbers, or all the same.
#
# All weights are read only where the logits of the probe's own pass are already known to be wrong, so loading a sound
# checkpoint takes no longer.


#: Dtypes in which a number overflows that float32 would hold.
_NARROW = (torch.float16,)


def check_numbers(name: str, model: Any, logits: Tensor) -> None:
    """Refuse a model whose logits cannot be told apart from anything.

    Args:
        logits: [..., vocab_size] of some texts.
    """
    if not bool(logits.isfinite().all()):
        raise ModelLoadError(name, *_not_finite(model))
    if not bool(logits.any()):
        raise ModelLoadError(name, *_all_zero(model))


def _weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The names of floating weights with their numbers, or those that rounded ones stand for."""
    quantised = {}
    for name, module in model.named_modules():
        if hasattr(module, "quantised_weight"):
            stored = module.quantised_weight
            quantised[f"{name}.weight"] = partial(stored.format.dequantise, stored, module.weight.dtype)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        numbers = quantised[name]() if name in quantised else tensor
        if numbers.is_floating_point() and numbers.numel():
            yield name, numbers


def _not_finite(model: Any) -> tuple[str, str]:
    """Returns what makes logits that are no numbers, and what would help."""
    again = "Download or save the checkpoint again."
    dtype = str(model.dtype).removeprefix("torch.")
    wider = f"Use dtype='float32', which holds larger numbers than {dtype}, or download or save the checkpoint again."
    overflow = wider if model.dtype in _NARROW else again
    for name, numbers in _weights(model):
        if bool(numbers.isnan().any()):
            return f"its weight {name} holds NaN, so its logits are no numbers", again
        if bool(numbers.isinf().any()):
            return f"its weight {name} is infinite in {dtype}, so its logits are no numbers", overflow
    name, size = _largest(model)
    return f"its logits overflow in {dtype}; the largest of its weights is {size:.1e}, in {name}", overflow


def _all_zero(model: Any) -> tuple[str, str]:
    """Returns what makes all logits zero, and what would help."""
    weights = [found for found in _weights(model) if not found[0].endswith("bias")]
    zero = [(name, numbers) for name, numbers in weights if not bool(numbers.any())]
    remedy = "Download or save the checkpoint again."
    if zero:
        name, _ = max(zero, key=lambda found: found[1].numel())  # a matrix sooner than the factors of a norm
        return f"its weight {name} is all zero, so its logits are all zero", remedy
    name, size = _largest(model)
    return f"its logits are all zero; the largest of its weights is {size:.1e}, in {name}", remedy


def _largest(model: Any) -> tuple[str, float]:
    sizes = ((name, float(numbers.abs().max())) for name, numbers in _weights(model))
    return max(sizes, key=lambda found: found[1])
