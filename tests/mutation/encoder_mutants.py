"""Bugs planted in models with an encoder: what a text takes from a source that is not its own, or reads wrongly."""

from __future__ import annotations

from tests.mutation.mutants import PROBE_DIFFERS, Mutant, Refusal


def _mutant(name: str, path: str, old: str, new: str, killer: str, refused: Refusal | None = None) -> Mutant:
    return Mutant(name, 0, path, old, new, killer, refused=refused)


_ATTENTION, _ROWS = "kernels/native/attention.inc", "model/attention.py"
#: In our kernels, or in what they are told.
ENCODER_KERNEL_MUTANTS = (
    _mutant(
        "all heads have the bias of the first",
        _ATTENTION,
        "shape->biases + head * shape->distances, shape->distances",
        "shape->biases, shape->distances",
        "kernels_sources",
        PROBE_DIFFERS,
    ),
    _mutant(
        "a bias belongs to the distance before",
        _ATTENTION,
        "scores[i] += biases[distance - i];",
        "scores[i] += biases[distance > i ? distance - i - 1 : 0];",
        "kernels_sources",
        PROBE_DIFFERS,
    ),
    _mutant(
        "far keys have the bias of nearer ones",
        _ATTENTION,
        "scores[i] += biases[last];",
        "scores[i] += biases[last / 2];",
        "kernels_distances",
    ),
    _mutant(
        "attention to a source has biases",
        "kernels/native/decoder.inc",
        ".softcap = layer->softcap};",
        ".softcap = layer->softcap, .biases = layer->biases, .distances = layer->distances};",
        "kernels_sources",
        PROBE_DIFFERS,
    ),
    _mutant(
        "rows see the source of the first text",
        _ROWS,
        "table_at=list(accumulate(map(len, tables), initial=0))[:-1],",
        "table_at=[0] * len(tables),",
        "kernels_sources",
    ),
    _mutant(
        "the last token of a source is not seen",
        _ROWS,
        "positions=[length - 1 for",
        "positions=[max(length - 2, 0) for",
        "kernels_sources",
        PROBE_DIFFERS,
    ),
    _mutant(
        "a source is computed from what another one left",
        "model/fused.py",
        "each) for each in encoded]",
        "encoded[0]) for _ in encoded]",
        "kernels_sources",
        Refusal("UnsupportedModelError", "no attention backend", "the probe at load cannot write a source of other length"),
    ),
)

_STAND_IN = "if context.sources is None or key is not context.sources.stand_in:"
ENCODER_MUTANTS = (
    _mutant(
        "all texts of a pass attend to one source",
        "model/context.py",
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
        "model/attention.py",
        _STAND_IN,
        "if True:",
        "encoder_batch",
        Refusal("UnsupportedModelError", "no attention backend", "the probe at load cannot compute a pass"),
    ),
    _mutant(
        "a source is found by the beginning of another one",
        "cache/state.py",
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
