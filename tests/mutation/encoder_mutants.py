"""Bugs planted in models with an encoder: what a text takes from a source that is not its own, or reads wrongly."""

from __future__ import annotations

from tests.mutation.mutants import PROBE_DIFFERS, Mutant, Refusal


def _mutant(name: str, path: str, old: str, new: str, killer: str, refused: Refusal | None = None) -> Mutant:
    return Mutant(name, 0, path, old, new, killer, refused=refused)


_STAND_IN = "if context.sources is None or key is not context.sources.stand_in:"
ENCODER_MUTANTS = (
    _mutant(
        "all texts of a pass attend to one source",
        "model/source_pass.py",
        "return self._slots[index]",
        "return self._slots[0]",
        "encoder_batch",
    ),
    _mutant(
        "a source is encoded with padding behind it",
        "model/hf_encoder.py",
        "(input_ids=token_ids[None]).last_hidden_state[0]",
        "(input_ids=token_ids.new_tensor([[*token_ids, 0, 0]])).last_hidden_state[0, :-2]",
        "encoder_batch",
        PROBE_DIFFERS,
    ),
    _mutant(
        "a bias counts the rows of a tree for its distances",
        "model/context.py",
        "device=device), own])\n        distances",
        "device=device), torch.arange(len(own)) + segment.start])\n        distances",
        "encoder_batch",
        PROBE_DIFFERS,
    ),
    _mutant(
        "attention to a source writes over the rows of the text",
        "model/backends/paged.py",
        _STAND_IN,
        "if True:",
        "encoder_batch",
        Refusal("UnsupportedModelError", "no attention backend", "the probe at load cannot compute a pass"),
    ),
    _mutant(
        "a source is found by the beginning of another one",
        "cache/source.py",
        'return ("source", self._namespace, self.token_ids)',
        'return ("source", self._namespace)',
        "encoder_prefixes",
    ),
    _mutant(
        "a text begins with what another source has led to",
        "cache/state.py",
        "return space if self.source is None else (*space, self.source.token_ids)",
        "return space",
        "encoder_prefixes",
    ),
)
