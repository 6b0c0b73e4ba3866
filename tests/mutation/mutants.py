"""Planted bugs: each a pitfall that shipped somewhere or was measured, as a patch to a copy of the package.

A mutant names the text it replaces, so that a change of the code which makes it moot fails loudly instead of passing.
Pitfall numbers follow the list in docs/explanation/losslessness.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """A typed error of the package that catches a bug before a check can judge its claim.

    Attributes:
        error: Its class.
        says: What its message holds.
        reason: Why this error is a catch and not a crash.
    """

    error: str
    says: str
    reason: str


KEY_REUSED = Refusal(
    "StepAbortedError",
    "NoiseReuseError",
    "the prover's source of chance refuses a key that is asked for twice: such draws are not independent",
)
TOKEN_REFUSED = Refusal(
    "ProcessingError",
    "parser stopped in consume_token",
    "the automaton follows the committed tokens and refuses one that a wrong mask let through",
)
PROBE_DIFFERS = Refusal(
    "UnsupportedModelError",
    "logits differ from a plain forward pass",
    "the probe at load compares every backend with a plain forward pass, on a ragged batch and a tree",
)


@dataclass(frozen=True)
class Mutant:
    """One planted bug.

    Attributes:
        name: What goes wrong.
        pitfall: Its number in the list.
        path: File below the package.
        old: Text that occurs there exactly once.
        new: What it becomes.
        killer: The check that must turn red (see judge.py); empty for a survivor.
        survives: Why no test can tell it from the real code; empty for one that must be killed.
        refused: The error that catches it; None where the killer's own claim must fail.
    """

    name: str
    pitfall: int
    path: str
    old: str
    new: str
    killer: str = ""
    survives: str = ""
    refused: Refusal | None = None


MUTANTS = (
    Mutant(
        "draft law reported before temperature and truncation",
        1,
        "propose/trees/growth.py",
        "probs = torch.stack([self.laws[n.parent].row for n in self.nodes])",
        "probs = torch.stack([self.laws[n.parent].row.pow(0.6) for n in self.nodes])\n"
        "        probs /= probs.sum(-1, keepdim=True)",
        "law_filtered",
    ),
    Mutant(
        "unlikely drawn token dropped before verification",
        2,
        "propose/trees/growth.py",
        "        if not self.nodes:\n            return EMPTY\n",
        "        while self.nodes and self.draws and self.confidence(len(self.nodes) - 1).token < 0.3:\n"
        "            self.nodes.pop()\n        if not self.nodes:\n            return EMPTY\n",
        "law_block",
    ),
    Mutant(
        "block acceptance with the token rule's residual",
        4,
        "verify/verifier.py",
        "for each in (p, q, weights)",
        "for each in (p, q, torch.ones_like(weights))",
        "verifier_block",
    ),
    Mutant(
        "token rule takes any accepted token, not the leading ones",
        4,
        "verify/verifier.py",
        "return coins.index(False) if False in coins else len(coins)",
        "return sum(coins)",
        "law_token",
    ),
    Mutant(
        "coins tossed with the draft's own keys",
        5,
        "verify/verifier.py",
        "return Key(self.owner, self.seed, self.sample, Stream.ACCEPT, position",
        "return Key(self.owner, self.seed, self.sample, Stream.DRAFT, position",
        "law_block",
        refused=KEY_REUSED,
    ),
    Mutant(
        "ratio test on drafts that share the target's noise",
        5,
        "verify/verifier.py",
        '    if coupled or Law.SAMPLED not in laws or Law.COUPLED in laws or rule_name in ("walk", "coupled"):\n'
        "        return Rule.WALK\n"
        "    one_by_one = draft.is_chain and draft.num_draws == len(draft) and laws == {Law.SAMPLED}\n",
        "    if not laws & {Law.SAMPLED, Law.COUPLED}:\n        return Rule.WALK\n    one_by_one = True\n",
        "law_seeded",
    ),
    Mutant(
        "noise that forgets the position",
        5,
        "verify/noise.py",
        "(k.seed, k.sample, int(k.stream) + (k.drafter << 8), k.position, k.round + (k.branch << 32))",
        "(k.seed, k.sample, int(k.stream) + (k.drafter << 8), 0, 0)",
        "noise_is_independent",
    ),
    Mutant(
        "draft accepted iff it is the target's most likely token",
        6,
        "verify/verifier.py",
        "tokens = self.noise.categorical(probs, keys)\n            chances = ",
        "tokens = argmax(probs)\n            chances = ",
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
        "return torch.where(total > 0, owed / total.clamp(min=torch.finfo(owed.dtype).tiny), target_row)",
        "return owed / total",
        "empty_residual",
    ),
    Mutant(
        "proposer's memory has a hole after full acceptance",
        9,
        "propose/draft_model.py",
        "        return [d.growth.draft() for d in drafting]",
        "        for d in drafting:\n            d.text.state.ahead += [n.token_id for n in d.growth.nodes[-1:]]\n"
        "        return [d.growth.draft() for d in drafting]",
        "self_draft_is_accepted",
    ),
    Mutant(
        "a prompt is read one token short",
        9,
        "propose/draft_model.py",
        "return len(self.settled) * prompt.stop // len(prompt.sequence.token_ids)",
        "return len(self.settled) * prompt.stop // len(prompt.sequence.token_ids) - 1",
        "prompts_are_read",
    ),
    Mutant(
        "the draft model reads a chunk of a prompt that the target is not at",
        9,
        "propose/draft_model.py",
        "        stop = max(start + count, start)\n        return [*self.settled[start:stop],",
        "        stop = max(start + count, start)\n        return [*self.settled[start + 1 : stop + 1],",
        "prompts_are_read",
    ),
    Mutant(
        "what was read of a prompt is forgotten",
        9,
        "propose/draft_model.py",
        "            each.text.record(each.segment.token_ids)\n",
        "            pass\n",
        "prompts_are_read",
    ),
    Mutant(
        "min_tokens judged at the first row for all rows",
        11,
        "verify/processing.py",
        "written = len(self._token_ids) - self._num_prompt_tokens + len(path)",
        "written = len(self._token_ids) - self._num_prompt_tokens",
        "min_tokens",
    ),
    Mutant(
        "penalties counted over the committed tokens alone",
        11,
        "verify/processing.py",
        "                output[row, token] += 1\n",
        "                pass\n",
        "law_penalties",
    ),
    Mutant(
        "repetition penalty forgets the prompt",
        11,
        "verify/processing.py",
        "seen = (prompt + output) > 0",
        "seen = output > 0",
        "law_penalties",
    ),
    Mutant(
        "bad words completed across a draft",
        11,
        "verify/processing.py",
        "before = (*self._token_ids[max(0, len(self._token_ids) - self._lengths[-1]) :], *path)",
        "before = (*self._token_ids[max(0, len(self._token_ids) - self._lengths[-1]) :],)",
        "law_bad_words",
    ),
    Mutant(
        "logits processors see the committed tokens alone",
        11,
        "verify/processing.py",
        "ids = torch.tensor([[*committed, *path]], device=row.device)",
        "ids = torch.tensor([committed], device=row.device)",
        "law_processors",
    ),
    Mutant(
        "one grammar mask for all rows of a draft",
        11,
        "verify/processing.py",
        "allowed = self._grammar.allowed(path, logits.shape[-1])",
        "allowed = self._grammar.allowed((), logits.shape[-1])",
        "law_structure",
        refused=TOKEN_REFUSED,
    ),
    Mutant(
        "automaton not rolled back after looking along a draft",
        11,
        "structured/grammar.py",
        "            self._matcher.rollback(len(self._ahead) - shared)\n",
        "            pass\n",
        "looks_are_taken_back",
    ),
    Mutant(
        "masks behind a draft kept when the text goes on",
        11,
        "structured/grammar.py",
        "        self._masks.clear()\n",
        "",
        "law_structure",
        refused=TOKEN_REFUSED,
    ),
    Mutant(
        "forced tokens written without being verified",
        26,
        "engine/drafting/planning.py",
        "    found = seq.view.processing.forced(min(rows_left, seq.useful_depth, MOST_FORCED))\n",
        "    from outrider.params import TokenOrigin\n\n"
        "    found = seq.view.processing.forced(min(rows_left, seq.useful_depth, MOST_FORCED))\n"
        "    seq.append(found[0], TokenOrigin.ACCEPTED) if found else None\n"
        "    found = found[1:]\n",
        "forced_and_forbidden",
    ),
    Mutant(
        "guesses at what is forced written without being verified",
        26,
        "verify/verifier.py",
        "                child = draft.child(node, token)\n",
        "                child = next(iter(draft.children(node)), None)\n",
        "law_of_wrong_forced_tokens",
    ),
    Mutant(
        "parameters applied to the target's first row only",
        11,
        "engine/verification.py",
        "processed[[rows[node] for node in sound]] = changed.logits\n",
        "processed[rows[0]] = changed.logits[0]\n",
        "law_penalties",
    ),
    Mutant(
        "logprobs of processed logits reported as raw",
        11,
        "engine/verification.py",
        "logprobs = raw_logprobs(raw[rows])",
        "logprobs = raw_logprobs(processed[rows])",
        "logprobs",
    ),
    Mutant(
        "logprobs taken from the row of the token itself",
        11,
        "engine/verification.py",
        "rows = torch.tensor([node + 1 for node, _ in written]",
        "rows = torch.tensor([node + 1 for node, _ in (*written[1:], written[-1])]",
        "logprobs",
    ),
    Mutant(
        "children drawn with replacement and said to be without",
        3,
        "propose/base.py",
        "        left[row, list(tokens)] = 0.0\n",
        "        pass\n",
        survives="inspection cuts the draft at a sibling that was drawn before; given that a sibling is another one, its "
        "probabilities are those without replacement, and whether it is one follows from its elder siblings alone",
    ),
    Mutant(
        "later siblings tested against the law of the first (recursive rejection)",
        3,
        "verify/rules.py",
        "            proposals[tree.members[draw]] = _without(proposal, token)\n",
        "",
        "law_recursive",
    ),
    Mutant(
        "later siblings tested against the law of the first (traversal)",
        3,
        "verify/rules.py",
        "        proposals[parent][member] = _without(proposal, tree.token(draw))\n",
        "",
        "law_tree",
    ),
    Mutant(
        "traversal keeps a parent's weight after a refusal",
        4,
        "verify/rules.py",
        "        weight[parent] = excess / below if below > 0 else one\n",
        "",
        "verifier_tree",
    ),
    Mutant(
        "traversal keeps a parent's law after a refusal",
        4,
        "verify/rules.py",
        "        wanted[parent] = _residual(wanted[parent], proposal, weight[parent])\n",
        "",
        "law_tree",
    ),
    Mutant(
        "walked children see the whole law instead of what the drawn ones left",
        3,
        "verify/rules.py",
        "            token = yield Draw(wanted, node, owed)\n            # A sampled",
        "            token = yield Draw(target_probs[node + 1], node, owed)\n            # A sampled",
        "law_merged",
    ),
    Mutant(
        "one test for a token that two members drew",
        3,
        "verify/rules.py",
        "            if law is Law.SAMPLED:\n",
        "            if law is Law.SAMPLED and node not in draft.nodes[:draw]:\n",
        "verifier_merged",
    ),
    Mutant(
        "opaque where two members drew the same token",
        3,
        "verify/verifier.py",
        "    if coupled or Law.SAMPLED not in laws",
        "    if draft.num_draws > len(draft) or coupled or Law.SAMPLED not in laws",
        "verifier_merged",
    ),
    Mutant(
        "the draws of a second member tested against what is left of the first one's law (recursive rejection)",
        3,
        "verify/rules.py",
        "            proposal = proposals.setdefault(tree.members[draw], draft_probs[draw])\n",
        "            proposal = proposals.setdefault(0, draft_probs[draw])\n",
        "verifier_merged",
    ),
    Mutant(
        "the draws of a second member tested against the first one's law (traversal)",
        3,
        "verify/rules.py",
        "own.setdefault(tree.members[draw], draft_probs[draw])",
        "own.setdefault(tree.members[draw], own[min(own)] if own else draft_probs[draw])",
        "verifier_merged",
    ),
    Mutant(
        "a stage claims the probabilities before temperature and truncation",
        1,
        "propose/staged.py",
        "target_probs(behind, [growth.request.sequence.sampling] * len(behind)) if growth.draws",
        "behind.softmax(-1) if growth.draws",
        "law_staged_filtered",
    ),
    Mutant(
        "a stage claims probabilities that are one place off",
        1,
        "propose/staged.py",
        "rows[[0, *(1 + node for node in verdict.path)]]",
        "rows[[0, *(node for node in verdict.path)]]",
        "law_staged",
    ),
    Mutant(
        "a stage claims the probabilities of the third place for all places behind it",
        1,
        "propose/staged.py",
        "rows[[0, *(1 + node for node in verdict.path)]]",
        "rows[[0, *(1 + verdict.path[min(i, 1)] for i in range(len(verdict.path)))]]",
        "law_of_stages",
    ),
    Mutant(
        "a stage drafts what it accepts of a guess and nothing else",
        23,
        "propose/staged.py",
        "        growth.follow((*stood, verdict.token_id), laws)\n",
        "        growth.follow(stood, laws[: len(stood)])\n        growth.level = []\n",
        "law_staged",
    ),
    Mutant(
        "the rounds of a stage are keyed alike",
        5,
        "propose/stage.py",
        "        view.round += 1\n",
        "",
        "staged_as_alone",
    ),
    Mutant(
        "a stage verifies with the keys of the engine's own verification",
        5,
        "propose/staged.py",
        "            noise.drafter(request),\n",
        "            0,\n",
        "law_staged",
        refused=KEY_REUSED,
    ),
    Mutant(
        "a stage guesses with noise of its own in a seeded text",
        5,
        "propose/staged.py",
        "            coupled=request.coupled,\n        )",
        "            coupled=False,\n        )",
        "staged_as_alone",
    ),
    Mutant(
        "an accepted branch of a guess stays where it was computed",
        16,
        "propose/staged.py",
        "text.state.run_ahead(stood, verdict.path)",
        "text.state.run_ahead(stood)",
        "staged_as_alone",
    ),
    Mutant(
        "an accepted branch of a guess is moved one place off",
        16,
        "propose/staged.py",
        "text.state.run_ahead(stood, verdict.path)",
        "text.state.run_ahead(stood, tuple(max(0, node - 1) for node in verdict.path))",
        "staged_as_alone",
    ),
    Mutant(
        "a stage verifies a guess without the parameters of the request",
        11,
        "propose/staged.py",
        "    if not len(rows) or not processing.active:\n",
        "    if True:\n",
        "staged_as_alone",
    ),
    Mutant(
        "the rule follows from whether somebody guessed behind drawn tokens",
        23,
        "verify/verifier.py",
        "    return Rule.BLOCK if one_by_one else Rule.TRAVERSAL\n",
        "    return Rule.BLOCK if one_by_one else Rule.TRAVERSAL if laws == {Law.SAMPLED} else Rule.RECURSIVE\n",
        "law_guess_behind",
    ),
    Mutant(
        "coins of a tree keyed by position alone",
        5,
        "verify/verifier.py",
        "Stream.ACCEPT, position, self.round, draw, self.drafter)",
        "Stream.ACCEPT, position, self.round, 0, self.drafter)",
        "law_tree",
        refused=KEY_REUSED,
    ),
    Mutant(
        "text goes on after a stop inside the draft",
        12,
        "engine/committing.py",
        "        if seq.status is not Status.RUNNING:\n            break\n        if node",
        "        if node",
        "stop_inside_draft",
    ),
    Mutant(
        "bonus token kept after a stop inside the draft",
        12,
        "engine/committing.py",
        "        if seq.status is not Status.RUNNING:\n            break\n        if node",
        "        if seq.status is not Status.RUNNING and place < len(verdict.path):\n            break\n        if node",
        "stop_inside_draft",
    ),
    Mutant(
        "a row behind the end of the text fails the request",
        12,
        "engine/verification.py",
        "            if 0 in of_rows:\n",
        "            for of_rows in [{0: fault} for fault in of_rows.values()]:\n",
        "stuck_behind_the_end",
    ),
    Mutant(
        "a ratio rule for a text that was guessed with the target's noise",
        5,
        "engine/scheduler.py",
        " or seeded or self.seq.coupled\n",
        " or seeded\n",
        "law_mixed_noise",
    ),
    Mutant(
        "a row without a token left is written from all the same",
        11,
        "engine/committing.py",
        "        if node + 1 in judged.faults:\n",
        "        if False:\n",
        "stuck_inside_the_text",
    ),
    Mutant(
        "positions of one sequence shifted in a ragged batch",
        14,
        "model/batch.py",
        "return np.concatenate([s.positions for s in self.segments])",
        "return np.concatenate([s.positions + i for i, s in enumerate(self.segments)])",
        "batch_equals_alone",
    ),
    Mutant(
        "accepted tree rows left where they were",
        16,
        "cache/state.py",
        "        if moved:  # never after a chain\n",
        "        if False:\n",
        "tree_text",
    ),
    Mutant(
        "position of a tree row by slot instead of depth",
        16,
        "model/batch.py",
        "return np.asarray(depth) + self.start",
        "return np.arange(len(depth)) + self.start",
        "tree_text",
        refused=PROBE_DIFFERS,
    ),
    Mutant(
        "a tree row sees its uncles",
        16,
        "model/batch.py",
        "seen[row] |= seen[parent]",
        "seen[row, : row + 1] = True",
        "tree_text",
        refused=PROBE_DIFFERS,
    ),
    Mutant(
        "sampled draft discarded for what it says",
        23,
        "propose/host.py",
        "    sound = draft if problem is None else draft.first(node) if node else EMPTY\n",
        "    if 0 in draft.token_ids:\n        return EMPTY, None\n"
        "    sound = draft if problem is None else draft.first(node) if node else EMPTY\n",
        "law_block",
    ),
    Mutant(
        "draft cut at a token the target will not take",
        23,
        "propose/host.py",
        "    sound = draft if problem is None else draft.first(node) if node else EMPTY\n",
        "    if 0 in draft.token_ids:\n        return draft.first(draft.token_ids.index(0)), None\n"
        "    sound = draft if problem is None else draft.first(node) if node else EMPTY\n",
        "law_block",
    ),
    Mutant(
        "draft length chosen after looking at the draft",
        24,
        "propose/host.py",
        "    sound = draft if problem is None else draft.first(node) if node else EMPTY\n",
        "    if draft.draft_probs is not None:\n"
        "        best = max(range(len(draft) + 1), key=lambda n: sum(\n"
        "            float(draft.draft_probs[i, draft.token_ids[i]]) - 0.34 "
        "for i in range(n)))\n        return draft.first(best), None\n"
        "    sound = draft if problem is None else draft.first(node) if node else EMPTY\n",
        "law_block",
    ),
    Mutant(
        "rotary factors of the longest text for the whole batch",
        25,
        "model/hf.py",
        "        if context is None or not context.batch.long_rows.any():\n",
        "        if True:\n",
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
        refused=PROBE_DIFFERS,
    ),
    Mutant(
        "copied block not filled",
        14,
        "engine/engine.py",
        "                self._make_copies(plan)  # first of all: a proposer may read the target's KV\n",
        "",
        "samples_apart",
    ),
)
