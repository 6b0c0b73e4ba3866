"""Proven requests for a target with a running state."""

from __future__ import annotations

from outrider.prove.settings.methods import (
    DFLASH,
    EAGLE1,
    EAGLE3,
    EAGLE3_ONE,
    EXIT,
    EXIT_ONE,
    LOOKUP,
    MEDUSA,
    ONE,
    OTHER,
    PEAGLE,
    drafted,
    exit_tree,
    staged,
)
from outrider.prove.settings.setting import Setting

#: Texts in which a stage has several rounds in one draft, of fewer paths.
_LONGER = {"max_tokens": 4, "top_k": 2}

#: Ways to draft for a target with a running state, by draft models with such states. Texts are so long that a pass goes on
#: behind a draft of which a part stood.
RUNNING_SETTINGS = (
    Setting("running state, chain", drafted("block"), _LONGER),
    Setting("running state, token rule", drafted("token"), _LONGER),
    Setting("running state, tree, traversal", drafted("block", tree=(2, 1)), _LONGER),
    Setting("running state, tree, recursive rejection", drafted("token", tree=(2, 1)), _LONGER),
    Setting("running state, seeded", drafted("auto"), {"seed": 5}),
    Setting("running state, lookup", LOOKUP),
    Setting("running state, early exit", EXIT, _LONGER),
    Setting("running state, early exit, tree", exit_tree("block")),
    Setting("running state, early exit, then the draft model", turns=((EXIT_ONE, drafted("block", num_draft_tokens=1)),)),
    Setting("running state, merged", {"method": "merge", "methods": (ONE, LOOKUP)}),
    Setting("running state, staged", staged(OTHER, num_draft_tokens=2)),
    Setting("running state, two samples", ONE, {"n": 2, "max_tokens": 2}),
)

#: Heads on the hidden states of such a target. They need several layers.
RUNNING_HEADS_SETTINGS = (
    Setting("running state, EAGLE-3", EAGLE3 | {"rule": "block"}, _LONGER),
    Setting("running state, EAGLE-3, token rule", EAGLE3 | {"rule": "token"}, _LONGER),
    Setting("running state, EAGLE-3, tree, traversal", EAGLE3 | {"tree": (2, 1), "rule": "block"}, _LONGER),
    Setting("running state, EAGLE-3, tree, recursive rejection", EAGLE3 | {"tree": (2, 1), "rule": "token"}, _LONGER),
    Setting("running state, EAGLE-3, seeded", EAGLE3, {"seed": 5}),
    Setting("running state, EAGLE-3 behind the draft model", turns=((ONE, EAGLE3_ONE),), params=_LONGER),
    Setting("running state, EAGLE", EAGLE1, _LONGER),
    Setting("running state, EAGLE-2: the likeliest tokens first", EAGLE1 | {"tree": "best_first"}, _LONGER),
    Setting("running state, Medusa", MEDUSA, _LONGER),
    Setting("running state, DFlash", DFLASH, _LONGER),
    Setting("running state, P-EAGLE", PEAGLE, _LONGER),
)
