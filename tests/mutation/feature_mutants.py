"""Bugs planted in heads with attention of their own: which feature, which rows, which norm."""

from __future__ import annotations

from tests.mutation.mutants import Mutant


def _mutant(name: str, path: str, old: str, new: str, killer: str = "features_make_the_drafts") -> Mutant:
    return Mutant(name, 0, path, old, new, killer)


_TEXTS, _ROWS = "propose/beside_target.py", "heads/rows.py"
_HEAD, _NETWORKS = "heads/runner.py", "heads/features.py"
FEATURE_MUTANTS = (
    _mutant(
        "a token is read beside its own feature", _HEAD, "(first[i : i + 1], rows[:-1])", "(first[i : i + 1], rows[1:])"
    ),
    _mutant(
        "the first feature that is kept is read", _TEXTS, "return self.rows[position - self.start]", "return self.rows[0]"
    ),
    _mutant(
        "every token of a draft reads the target's feature",
        _HEAD,
        "draft.features[row] = features",
        "draft.features[row] = draft.features[-1]",
    ),
    _mutant("rows of a tree see their siblings", _HEAD, "mask = None if seen.all() else", "mask = None if True else"),
    _mutant(
        "rows of a draft stand at one position", _ROWS, "else self.positions[parent] + 1)", "else self.positions[parent])"
    ),
    _mutant(
        "the first token has a row", _HEAD, "_with_room(rows[self.unseen(level) :], room", "_with_room(rows[level:-1], room"
    ),
    _mutant(
        "samples forget the feature that their prompt ends with",
        _TEXTS,
        "self._features[child.seq_id] = self._features[parent.seq_id]",
        "parts = self._features[parent.seq_id]; self._features[child.seq_id] = LastFeatures(parts.start, 2 * parts.rows)",
        "features_of_samples",
    ),
    _mutant(
        "features are joined from high to low",
        _HEAD,
        "for layer in self.aux_layers]",
        "for layer in reversed(self.aux_layers)]",
    ),
    _mutant(
        "layers that are nested in a configuration are those whose inputs are read",
        "heads/formats/safeailab.py",
        "tuple(i + 1 for i in",
        "tuple(i for i in",
    ),
    _mutant(
        "the residual is never normed",
        _NETWORKS,
        "normed if self.config.norm_before_residual else features",
        "features",
    ),
    _mutant(
        "the next token reads what lies before the norm",
        _NETWORKS,
        "self.norm(left) if self.config.norm_output",
        "left if 1",
    ),
    _mutant(
        "the feature comes before the embedding",
        _NETWORKS,
        "torch.cat([embeddings, features], -1)",
        "torch.cat([features, embeddings], -1)",
    ),
    _mutant(
        "dimensions turn with their neighbours",
        _NETWORKS,
        "first, second = rows.chunk(2, -1)",
        "second, first = rows.chunk(2, -1)",
    ),
    _mutant(
        "layers of the checkpoint read what lies before the final norm",
        "heads/mtp.py",
        "MtpNetwork(layers), (target.num_layers,)",
        "MtpNetwork(layers), (target.num_layers - 1,)",
        "mtp_makes_the_drafts",
    ),
    _mutant(
        "layers of the checkpoint read [hidden state, embedding]",
        "heads/mtp.py",
        "[self.embedding_norm(embeddings), self.hidden_norm(features)]",
        "[self.hidden_norm(features), self.embedding_norm(embeddings)]",
        "mtp_makes_the_drafts",
    ),
    _mutant(
        "norms of layers of the checkpoint do not add 1",
        "heads/mtp.py",
        "norm.weight = nn.Parameter(weight, requires_grad=False)",
        "norm.weight = nn.Parameter(weight - 1, requires_grad=False)",
        "mtp_makes_the_drafts",
    ),
    _mutant(
        "layers of the checkpoint keep nothing of the prompt",
        _HEAD,
        "text.start, keys[rows].to(dtype), values[rows].to(dtype))",
        "text.start, 0 * keys[rows].to(dtype), 0 * values[rows].to(dtype))",
        "mtp_makes_the_drafts",
    ),
    _mutant(
        "rows of added layers stay that the text did not take",
        "cache/state.py",
        "self.num_filled[number] = min(filled, self.end)",
        "self.num_filled[number] = min(filled, self.end + 1)",
        "heads_in_a_stage",
    ),
    _mutant(
        "a head in a stage goes on behind rows that it was not shown",
        "cache/state.py",
        "        if held < self.end:\n",
        "        if False:\n",
        "heads_beside_their_draft_model",
    ),
    _mutant(
        "tokens that may be drafted are counted from the first one",
        "propose/bridge.py",
        "wide.index_copy_(1, self._tokens.to(logits.device), logits)",
        "wide.index_copy_(1, torch.arange(logits.shape[1]), logits)",
    ),
)
