"""Proven requests for a target with an encoder."""

from __future__ import annotations

from outrider.prove.settings.methods import EXIT, LOOKUP, drafted, exit_tree
from outrider.prove.settings.setting import Setting

#: Texts in which a pass goes on behind a draft of which a part stood.
_LONGER = {"max_tokens": 4, "top_k": 2}

#: Ways to draft for a target with an encoder, by draft models with encoders of their own.
ENCODER_SETTINGS = (
    Setting("encoder, chain", drafted("block"), _LONGER),
    Setting("encoder, tree, traversal", drafted("block", tree=(2, 1)), _LONGER),
    Setting("encoder, tree, recursive rejection", drafted("token", tree=(2, 1)), _LONGER),
    Setting("encoder, seeded", drafted("auto"), {"seed": 5}),
    Setting("encoder, lookup", LOOKUP),
    Setting("encoder, early exit", EXIT, _LONGER),
    Setting("encoder, early exit, tree", exit_tree("block")),
)
