"""Bugs planted in rooms whose every line the core of the tests reads: without_kills.py asks whether one of them turns red.

They have no check of their own here, since the tests of these rooms are their checks.
"""

from __future__ import annotations

from tests.mutation.mutants import Mutant


def _mutant(name: str, path: str, old: str, new: str) -> Mutant:
    return Mutant(name, 0, path, old, new)


ROOM_MUTANTS = (
    _mutant(
        "zero points of GPTQ's first version stay too low",
        "loading/quantised.py",
        "zeros = zeros + _ONES[self.bits]",
        "zeros = zeros + 0",
    ),
    _mutant(
        "codes of AWQ in their order",
        "loading/quantised.py",
        "(0, 4, 1, 5, 2, 6, 3, 7)",
        "(0, 1, 2, 3, 4, 5, 6, 7)",
    ),
    _mutant(
        "the two numbers of a byte change places",
        "kernels/formats.py",
        "torch.stack([data & 15, data >> 4], -1)",
        "torch.stack([data >> 4, data & 15], -1)",
    ),
    _mutant(
        "heads of values stay in the order of files",
        "loading/gguf/arrangement.py",
        ".reshape(each, keys, size).transpose(0, 1)",
        ".reshape(each, keys, size)",
    ),
    _mutant(
        "columns of blocks are followed the other way round",
        "loading/gguf/header.py",
        "known.stored(wanted, dtype), torch.argsort(columns))",
        "known.stored(wanted, dtype), columns)",
    ),
    _mutant(
        "factors of long texts for short ones",
        "loading/gguf/rotary.py",
        "_factors(values, SHORT_FACTORS, count)",
        "_factors(values, LONG_FACTORS, count)",
    ),
    _mutant(
        "DFlash reads what enters its layers of the target",
        "heads/formats/zlab.py",
        "tuple(i + 1 for i in ids)",
        "tuple(i for i in ids)",
    ),
    _mutant(
        "a projection of MTP is read with its halves exchanged",
        "heads/formats/mtp.py",
        '_exchanged(own["fc"]) if layout.hidden_first else own["fc"]',
        'own["fc"]',
    ),
    _mutant(
        "all mask tokens of P-EAGLE stand at the first position",
        "heads/block.py",
        "block.position + i for block",
        "block.position for block",
    ),
    _mutant(
        "rows of P-EAGLE see the first token of the text",
        "heads/block.py",
        "kept[unseen:].to(keys.dtype)",
        "kept[:].to(keys.dtype)",
    ),
    _mutant(
        "a delta rule that corrects nothing",
        "model/running.py",
        "(value - _said(state, key)) * share",
        "value * share",
    ),
    _mutant(
        "a tape keeps the rows of rejected tokens",
        "cache/running.py",
        "*(start + row - self.tape_start for row in rows if start + row >= self.tape_start)",
        "*range(before, before + len(rows))",
    ),
    _mutant(
        "a text changes the states that the prefix cache keeps",
        "cache/blocks.py",
        "return self._states[block].fork()",
        "return self._states[block]",
    ),
    _mutant("the state used last is given up", "cache/blocks.py", "popitem(last=False)", "popitem(last=True)"),
    _mutant(
        "a source is found by its beginning",
        "cache/state.py",
        'return ("source", self._namespace, self.token_ids)',
        'return ("source", self._namespace, self.token_ids[:2])',
    ),
    _mutant("biases by distance lie the other way round", "model/hf_encoder.py", "[0, :, 0].flip(-1)", "[0, :, 0]"),
    _mutant(
        "records of a key that asked for none",
        "server/recorder.py",
        " or job.is_silent or job.asked.store is False",
        " or job.is_silent",
    ),
    _mutant(
        "texts that were broken off are trained on",
        "server/recorder.py",
        'if output.finish_reason != "cancelled"',
        "if True",
    ),
    _mutant("records outgrow their budget", "server/recorder.py", "if left < 0:", "if False:"),
    _mutant(
        "a merge counts what came behind the end of a text",
        "engine/drafting/choosing.py",
        "if not own or (place == entered and ended):",
        "if not own:",
    ),
    _mutant(
        "members of a merge are believed never to agree",
        "govern/decision.py",
        "a + share * (b - a * b) if a > b else b + share * (a - a * b)",
        "a + (b - a * b)",
    ),
    _mutant(
        "the first member of a merge gets all rows",
        "engine/drafting/planning.py",
        "chance * self._rates[place] if",
        "chance if",
    ),
)
