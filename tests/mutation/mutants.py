"""Planted bugs: each a pitfall that shipped somewhere or was measured, as a patch to a copy of the package.

A mutant names the text it replaces, so that a change of the code which makes it moot fails loudly instead of passing.
Pitfall numbers follow the list in docs/losslessness.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One planted bug.

    Attributes:
        name: What goes wrong.
        pitfall: Its number in the list.
        path: File below the package.
        old: Text that occurs there exactly once.
        new: What it becomes.
        killer: The check in killers.py that must turn red; empty for a survivor.
        survives: Why no test can tell it from the real code; empty for one that must be killed.
    """

    name: str
    pitfall: int
    path: str
    old: str
    new: str
    killer: str = ""
    survives: str = ""


MUTANTS = (
    Mutant(
        "draft law reported before temperature and truncation",
        1,
        "propose/draft_model.py",
        "for i, law in zip(drawing, probs, strict=True):",
        "for i, law in zip(drawing, logits[index].softmax(-1), strict=True):",
        "law_filtered",
    ),
    Mutant(
        "unlikely drawn token dropped before verification",
        2,
        "propose/draft_model.py",
        "        if not g.draws:\n            return Draft.chain(g.tokens, Law.DETERMINISTIC)\n",
        "        if not g.draws:\n            return Draft.chain(g.tokens, Law.DETERMINISTIC)\n"
        "        while g.tokens and g.laws[-1][g.tokens[-1]] < 0.3:\n            g.tokens.pop()\n            g.laws.pop()\n"
        "        if not g.tokens:\n            return EMPTY\n",
        "law_block",
    ),
    Mutant(
        "block acceptance with the token rule's residual",
        4,
        "engine/verifier.py",
        "q_next, weights[lane, accepted])",
        "q_next, torch.ones_like(weights[lane, accepted]))",
        "verifier_block",
    ),
    Mutant(
        "token rule takes any accepted token, not the leading ones",
        4,
        "engine/verifier.py",
        "accepted = coins.long().cumprod(1).sum(1)",
        "accepted = coins.long().sum(1)",
        "law_token",
    ),
    Mutant(
        "coins tossed with the draft's own keys",
        5,
        "engine/verifier.py",
        "return _key(candidate, Stream.ACCEPT, row, candidate.seq.view.round)",
        "return _key(candidate, Stream.DRAFT, row, candidate.seq.view.round)",
        "law_block",
    ),
    Mutant(
        "ratio test on drafts that share the target's noise",
        5,
        "engine/verifier.py",
        "if draft.uniform_law() is not Law.SAMPLED or not draft.is_chain",
        "if draft.uniform_law() not in (Law.SAMPLED, Law.COUPLED) or not draft.is_chain",
        "law_seeded",
    ),
    Mutant(
        "noise that forgets the position",
        5,
        "verify/noise.py",
        "else (k.seed, k.sample, k.stream, k.position, k.round)",
        "else (k.seed, k.sample, k.stream, 0, 0)",
        "noise_is_independent",
    ),
    Mutant(
        "draft accepted iff it is the target's most likely token",
        6,
        "engine/verifier.py",
        "if laws.candidates[member].seq.request.params.greedy:",
        "if True:",
        "law_walk",
    ),
    Mutant(
        "coin falls at u <= p instead of u < p",
        7,
        "verify/noise.py",
        "return uniform(bits) < probability",
        "return uniform(bits) <= probability",
        survives="uniforms are never 0 and, at 52 bits, equal a given probability with chance 2^-52: the same law",
    ),
    Mutant(
        "epsilon in the draft's probability",
        7,
        "verify/rules.py",
        "return torch.where(q > 0, (p / q).clamp(max=largest), 0.0)",
        "return torch.where(q > 0, (p / (q + 1e-2)).clamp(max=largest), 0.0)",
        "law_block",
    ),
    Mutant(
        "no fallback where the residual is empty",
        8,
        "verify/rules.py",
        "return torch.where(total > 0, owed / total.clamp(min=torch.finfo(owed.dtype).tiny), target_law)",
        "return owed / total",
        "empty_residual",
    ),
    Mutant(
        "proposer's memory has a hole after full acceptance",
        9,
        "propose/draft_model.py",
        "        return [self._finished(g, noise) for g in growing]",
        "        for g in growing:\n            g.progress.computed += g.tokens[-1:]\n"
        "        return [self._finished(g, noise) for g in growing]",
        "self_draft_is_accepted",
    ),
    Mutant(
        "min_tokens judged at the first row for all rows",
        11,
        "engine/verifier.py",
        "view.forbidden_at(base + depth)",
        "view.forbidden_at(base)",
        "min_tokens",
    ),
    Mutant(
        "text goes on after a stop inside the draft",
        12,
        "engine/engine.py",
        "        for node in verdict.path:\n            if seq.status is Status.RUNNING:\n",
        "        for node in verdict.path:\n            if True:\n",
        "stop_inside_draft",
    ),
    Mutant(
        "bonus token kept after a stop inside the draft",
        12,
        "engine/engine.py",
        "        if seq.status is Status.RUNNING:\n            seq.append(verdict.token_id",
        "        if True:\n            seq.append(verdict.token_id",
        "stop_inside_draft",
    ),
    Mutant(
        "positions of one sequence shifted in a ragged batch",
        14,
        "model/batch.py",
        "self.position_ids = self._tensor(np.concatenate([s.positions for s in self.segments]))[None]",
        "self.position_ids = self._tensor(np.concatenate([s.positions + i for i, s in enumerate(self.segments)]))[None]",
        "batch_equals_alone",
    ),
    Mutant(
        "accepted tree rows left where they were",
        16,
        "engine/engine.py",
        "self.runner.compact(seq.block_table, start, [0, *(node + 1 for node in verdict.path)])",
        "pass",
        "tree_text",
    ),
    Mutant(
        "position of a tree row by slot instead of depth",
        16,
        "model/batch.py",
        "return np.asarray(depth) + self.start",
        "return np.arange(len(depth)) + self.start",
        "tree_text",
    ),
    Mutant(
        "a tree row sees its uncles",
        16,
        "model/batch.py",
        "seen[row] |= seen[parent]",
        "seen[row, : row + 1] = True",
        "tree_text",
    ),
    Mutant(
        "sampled draft discarded for what it says",
        23,
        "engine/drafting.py",
        "    bad_laws = _unsound_laws(draft)\n",
        "    bad_laws = _unsound_laws(draft)\n    if 0 in draft.token_ids:\n        return EMPTY, None\n",
        "law_block",
    ),
    Mutant(
        "draft cut at a token the target will not take",
        23,
        "engine/drafting.py",
        "    bad_laws = _unsound_laws(draft)\n",
        "    bad_laws = _unsound_laws(draft)\n    if 0 in draft.token_ids:\n"
        "        return draft.first(draft.token_ids.index(0)), None\n",
        "law_block",
    ),
    Mutant(
        "draft length chosen after looking at the draft",
        24,
        "engine/drafting.py",
        "    bad_laws = _unsound_laws(draft)\n",
        "    bad_laws = _unsound_laws(draft)\n    if draft.draft_probs is not None:\n"
        "        best = max(range(size + 1), key=lambda n: sum(float(draft.draft_probs[i, draft.token_ids[i]]) - 0.34 "
        "for i in range(n)))\n        return draft.first(best), None\n",
        "law_block",
    ),
    Mutant(
        "longrope context not limited",
        25,
        "model/hf.py",
        'if rope.get("rope_type") in ("longrope", "dynamic"):',
        "if False:",
        "longrope",
    ),
    Mutant(
        "a published block found by its own tokens alone",
        14,
        "cache/blocks.py",
        "            block = self._published.get((parent, self._tokens_of(token_ids, index)))\n",
        "            tokens = self._tokens_of(token_ids, index)\n"
        "            block = next((b for k, b in self._published.items() if k[1] == tokens), None)\n",
        "prefix_cache",
    ),
    Mutant(
        "samples write to blocks they share",
        14,
        "cache/blocks.py",
        "        for i in self.shared_from(table, start, stop):\n",
        "        for i in []:\n",
        "samples_apart",
    ),
    Mutant(
        "sliding window ignored",
        17,
        "model/context.py",
        "    if reach.window is not None:\n",
        "    if False:\n",
        "window",
    ),
    Mutant(
        "copied block not filled",
        14,
        "engine/engine.py",
        "            self.runner.copy_blocks(plan.copies)\n",
        "",
        "samples_apart",
    ),
)
