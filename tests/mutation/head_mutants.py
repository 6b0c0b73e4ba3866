"""Bugs planted where our kernels compute the layer of a head: which rows, which norms, which blocks."""

from __future__ import annotations

from tests.mutation.mutants import Mutant


def _mutant(name: str, path: str, old: str, new: str, killer: str = "kernels_features") -> Mutant:
    return Mutant(name, 0, path, old, new, killer)


_DECODER, _ATTENTION = "kernels/native/decoder.inc", "kernels/native/attention.inc"
_HEAD, _ROWS, _MTP = "heads/fused_head.py", "heads/rows.py", "heads/mtp.py"
HEAD_MUTANTS = (
    _mutant(
        "all rows have the embedding of the first",
        _DECODER,
        "pass->tokens[r], pass->positions[r], worker->normed",
        "pass->tokens[0], pass->positions[r], worker->normed",
    ),
    _mutant(
        "embeddings have the norm of features",
        _DECODER,
        "NAME(apply_norm)(&layer->beside_norm,",
        "NAME(apply_norm)(&layer->attention_norm,",
    ),
    _mutant("what attention adds to is never normed", _DECODER, "if (layer->normed_residual)", "if (0)"),
    _mutant("what is kept begins with queries", _DECODER, "NAME(panel_at)(&layer->qkv, queries)", "rest.data"),
    _mutant("what is kept has the biases of queries", _DECODER, "rest.bias += queries * PANEL", "rest.bias += 0"),
    _mutant("no token is unseen", _ATTENTION, "NAME(least)(shape->unseen, position)", "0"),
    _mutant("the first token is seen", _HEAD, "unseen=1", "unseen=0"),
    _mutant(
        "the layer never norms what it adds to",
        _HEAD,
        "normed_residual=config.norm_before_residual",
        "normed_residual=False",
    ),
    _mutant("the next token reads what was not normed", _HEAD, "aux.get(_NORMED, left)", "left"),
    _mutant(
        "a text is read beside its own features",
        _HEAD,
        "features_before(before, features, spans)",
        "features",
    ),
    _mutant(
        "every row of a draft reads the target's feature",
        _HEAD,
        "draft.features[row] = feature",
        "draft.features[row] = draft.features[-1]",
    ),
    _mutant(
        "drafts of a step share their blocks",
        _HEAD,
        "draft.lies_in_blocks(kv, added, free)",
        "draft.lies_in_blocks(kv, added, iter(added.draft_blocks))",
    ),
    _mutant(
        "a row of a tree sees all rows before it",
        _ROWS,
        "self.seen[row] = self.seen[parent]",
        "self.seen[row, :row] = 1",
    ),
    _mutant(
        "a tree is taken for a chain",
        _ROWS,
        "self.positions[-1] == self.held + len(self.positions) - 1",
        "True",
    ),
    _mutant(
        "the first block of a draft lacks what the text has in it",
        _ROWS,
        "added.begin_block(own[0], kv, self.held)",
        "pass",
    ),
    _mutant(
        "rows of a draft lie a slot too early",
        _ROWS,
        "divmod(self.held + row, self.block_size)",
        "divmod(self.held + row - 1, self.block_size)",
    ),
    _mutant(
        "all drafts of a step lie in the blocks of the first",
        _ROWS,
        "table_at=_begins(len(draft.block_table) for draft in drafts)",
        "table_at=[0] * len(parts)",
    ),
    _mutant(
        "a layer of a checkpoint hands on what lies before its norm",
        _MTP,
        "passes_normed = True",
        "passes_normed = False",
        "mtp_makes_the_drafts",
    ),
    _mutant(
        "the output layer reads what lies before the norm of a layer of a checkpoint",
        _MTP,
        "final_norm=norm_of(stack.norm, family)",
        "final_norm=None",
        "mtp_makes_the_drafts",
    ),
    _mutant(
        "embeddings enter a layer of a checkpoint behind the norm of features",
        _DECODER,
        "&model->entry_norms[0]",
        "&model->entry_norms[1]",
        "mtp_makes_the_drafts",
    ),
    _mutant(
        "all rows enter a layer of a checkpoint with the features of the first",
        _DECODER,
        "pass->hidden_in + r * hidden, hidden, brought",
        "pass->hidden_in, hidden, brought",
        "mtp_makes_the_drafts",
    ),
    _mutant(
        "a layer of a checkpoint sees the first token, which has nothing to read",
        _MTP,
        "unseen=1",
        "unseen=0",
        "mtp_makes_the_drafts",
    ),
)
