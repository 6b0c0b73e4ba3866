"""Facts about the model and the methods of this server, for the pages."""

from __future__ import annotations

from typing import Any

from outrider.measure.machine import weight_bytes
from outrider.propose.speculation import SpeculationConfig
from outrider.server.service import Service


def facts(service: Service) -> dict[str, Any]:
    """Name, length and weights of the model, and the methods that draft by themselves, the server's own first."""
    runner = service.engine.llm.engine.runner
    loaded, usual = runner.loaded, service.allowed.usual
    configs = [service.allowed.of(name, predicted=False) for name in service.allowed.names]
    drafting = [config for config in configs if config.enabled and config.name != "prediction"]
    drafting.sort(key=lambda config: config.name != usual.name)
    return {
        "model": service.settings.model_name,
        "max_model_len": service.facts.longest,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "weight_bytes": runner.backend.weight_bytes(loaded.model) or weight_bytes(loaded.model),
        "max_texts": min(service.settings.max_n, service.facts.max_num_seqs),
        "methods": [_method(config, invariant=runner.invariant) for config in drafting],
    }


def _method(config: SpeculationConfig, *, invariant: bool) -> dict[str, Any]:
    method = config.method
    assert method is not None
    return {
        "name": config.name,
        "num_draft_tokens": config.num_draft_tokens,
        "takes_tree": method.allows_tree,
        "adapts": method.allows_tree and method.grows_from_probabilities,
        "least_length": method.least_length(),
        "takes_seeds": invariant or not config.engine_chooses,
    }
