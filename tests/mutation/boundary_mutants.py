"""Bugs planted where proposers meet the engine: who drew, whose memory it is, which rows come back."""

from __future__ import annotations

from tests.mutation.mutants import Mutant, Refusal


def _mutant(name: str, path: str, old: str, new: str, killer: str, refused: Refusal | None = None) -> Mutant:
    return Mutant(name, 0, path, old, new, killer, refused=refused)


TEXTS_DIFFER = Refusal(
    "AssertionError",
    "the program is not deterministic",
    "the prover walks every path from one state, and sees that a decision does not come again",
)

BOUNDARY_MUTANTS = (
    # -- chains without a wait --
    _mutant(
        "what was computed ahead is forgotten",
        "propose/draft_model.py",
        "            state.ahead[-unknown:] = possible[:unknown]\n",
        "            del state.ahead[-unknown:]\n",
        "chains_run_ahead_alike",
    ),
    _mutant(
        "every token of a chain has the noise of the first",
        "propose/trees/growth.py",
        "drawn = noise.ahead(probs, requests, depth)",
        "drawn = noise.ahead(probs, requests, 0)",
        "chains_run_ahead_alike",
    ),
    _mutant(
        "a shorter chain keeps its place",
        "propose/draft_model.py",
        "tokens = tokens[torch.tensor(going).to(tokens.device, non_blocking=True)]",
        "tokens = tokens[: len(going)]",
        "chains_run_ahead_alike",
    ),
    # -- noise --
    _mutant(
        "every drafter of a sequence has the same number",
        "propose/base.py",
        "        return (number << _DRAFTER_BITS) + request.drafter\n",
        "        return number << _DRAFTER_BITS\n",
        "drafters_draw_apart",
    ),
    _mutant(
        "the drafter is left out of the bits",
        "verify/noise.py",
        "(k.seed, k.sample, int(k.stream) + (k.drafter << 8), k.position,",
        "(k.seed, k.sample, int(k.stream), k.position,",
        "drafters_draw_apart",
    ),
    _mutant(
        "every request says that its first drafter is asked",
        "engine/drafting/asking.py",
        "            place,\n            drafter.report_inner_fault,\n",
        "            0,\n            drafter.report_inner_fault,\n",
        "drafters_draw_apart",
    ),
    _mutant(
        "two turns of one drafter draw with the same keys",
        "engine/drafting/asking.py",
        "            place,\n            drafter.report_inner_fault,\n",
        "            drafter.index,\n            drafter.report_inner_fault,\n",
        "one_model_drafts_twice",
    ),
    _mutant(
        "what was drawn before a fault is dropped",
        "propose/host.py",
        "return sound_prefix(drawn, *limits)[0] if len(drawn) else sound.opaque(), problem or undrawn",
        "return sound, problem or undrawn",
        "what_was_drawn_is_tested",
    ),
    _mutant(
        "a stage goes on without what its drafter drew before a fault",
        "propose/stage.py",
        "            found[i] = draft.with_scratch(0)\n",
        "            found[i] = EMPTY if texts[0].fault is not None else draft.with_scratch(0)\n",
        "what_was_drawn_is_tested",
    ),
    _mutant(
        "what a stage has written is not noted as drawn",
        "propose/trees/growth.py",
        "                self.request.drawn.note(",
        "                str(",
        "stages_have_no_faults",
    ),
    _mutant(
        "draws of a stage's drafter count as those of the stage",
        "propose/stage.py",
        "            drawn=Drawn(),\n",
        "",
        "stages_have_no_faults",
    ),
    _mutant(
        "probabilities are what a proposer says",
        "propose/base.py",
        "zip(rows, _are_rows(draft.draft_probs, rows), strict=True)",
        "zip(rows, [True] * len(rows), strict=True)",
        "lies_are_seen",
    ),
    _mutant(
        "draws of all drafts at once are what proposers say",
        "propose/host.py",
        "return all(same and _number_problem(",
        "return all(_number_problem(",
        "lies_are_seen",
    ),
    _mutant(
        "a token may be left out of a draft",
        "propose/base.py",
        "if told.get(path) != tokens:",
        "if False:",
        "what_was_drawn_is_tested",
    ),
    _mutant(
        "members of a nested proposer draw with the noise of the whole",
        "propose/base.py",
        "return DraftNoise(self.source, (*self._members, index))",
        "return DraftNoise(self.source, self._members)",
        "drafters_draw_apart",
    ),
    _mutant(
        "drawn drafts guess with the target's noise",
        "propose/base.py",
        "Stream.GUESS if request.coupled else Stream.DRAFT",
        "Stream.GUESS",
        "turns_drawn",
    ),
    _mutant(
        "ratio test on coupled drafts of two turns",
        "verify/verifier.py",
        '    if coupled or Law.SAMPLED not in laws or Law.COUPLED in laws or rule_name in ("walk", "coupled"):\n'
        "        return Rule.WALK\n"
        "    one_by_one = draft.is_chain and draft.num_draws == len(draft) and laws == {Law.SAMPLED}\n",
        "    if not laws & {Law.SAMPLED, Law.COUPLED}:\n        return Rule.WALK\n    one_by_one = True\n",
        "turns_coupled",
    ),
    # -- turns --
    _mutant(
        "the second draft hangs on the root",
        "engine/drafting/asking.py",
        "self.draft.joined(tail, root)",
        "self.draft.joined(tail, -1)",
        "a_turn_goes_on_where_the_last_stopped",
    ),
    _mutant(
        "the second draft hangs on the last node instead of the deepest",
        "engine/drafting/asking.py",
        "return max(nodes, key=lambda node: depths[node], default=self.num_forced - 1)",
        "return max(nodes, default=self.num_forced - 1)",
        "a_turn_goes_on_where_the_last_stopped",
    ),
    _mutant(
        "probabilities of two drafts swapped",
        "draft.py",
        "    return torch.cat(parts)\n",
        "    return torch.cat(parts[::-1])\n",
        "turns_drawn",
    ),
    _mutant(
        "the planner is asked after drafting and looks at the draft",
        "engine/drafting/drafting.py",
        "        return propose_all(plan.items, drafters, self.builders, noise)\n",
        "        found = propose_all(plan.items, drafters, self.builders, noise)\n"
        "        for step in found:\n"
        "            if len(step.draft) and step.draft.token_ids[-1] == 0:\n"
        "                step.draft = step.draft.first(len(step.draft) - 1)\n"
        "        return found\n",
        "turns_drawn",
    ),
    _mutant(
        "the length that a draft follows forgets the path",
        "propose/base.py",
        "return len(self.sequence.token_ids) + len(self.path)",
        "return len(self.sequence.token_ids)",
        "a_turn_goes_on_where_the_last_stopped",
    ),
    _mutant(
        "a turn is not told what the one before drafted",
        "engine/drafting/asking.py",
        "            max_depth,\n            path,\n",
        "            max_depth,\n            (),\n",
        "a_turn_goes_on_where_the_last_stopped",
    ),
    _mutant(
        "a fault demotes every drafter of the sequence",
        "engine/drafting/asking.py",
        "            answers = members[0].host.ask(members, requests, DraftNoise(noise))\n",
        "            answers = members[0].host.ask(members, requests, DraftNoise(noise))\n"
        "            for seq in (item.seq for item in items):\n"
        "                for drafter in seq.drafters:\n"
        "                    drafter.believed = all(other.believed for other in seq.drafters)\n",
        "a_fault_is_ones_own",
    ),
    _mutant(
        "a drafter is believed after its fault",
        "propose/host.py",
        "drafts.append(sound if truthful else sound.opaque())",
        "drafts.append(sound)",
        "a_fault_is_ones_own",
    ),
    _mutant(
        "what a proposer learnt is not restored",
        "propose/suffix.py",
        "        self.shared = deepcopy(state)\n",
        "",
        "texts_are_forgotten_again",
    ),
    _mutant(
        "paths of a proof start with what the one before has taught",
        "lab/prove/engine.py",
        "                proposer.restore(state)\n",
        "                pass\n",
        "paths_start_alike",
        TEXTS_DIFFER,
    ),
    # -- memory --
    _mutant(
        "shared blocks copied after the proposers have read them",
        "engine/engine.py",
        "                self._make_copies(plan)  # first of all: a proposer may read the target's KV\n"
        "                self.runner.partial_rows.clear()\n"
        "                drafts = self.drafting.propose(plan, self.noise)\n",
        "                self.runner.partial_rows.clear()\n"
        "                drafts = self.drafting.propose(plan, self.noise)\n"
        "                self._make_copies(plan)\n",
        "shallow",
    ),
    _mutant(
        "rolling back keeps a token that the text does not confirm",
        "cache/state.py",
        "            if self.ahead[confirmed] != (token_ids[place] if place < size else loose[place - size]):\n",
        "            if False:\n",
        "states",
    ),
    _mutant(
        "rolling back leaves the tokens ahead",
        "cache/state.py",
        "self.ahead = self.ahead[settled:confirmed]\n",
        "self.ahead = self.ahead[settled:]\n",
        "states",
    ),
    _mutant(
        "a fork forgets how much is computed",
        "cache/state.py",
        "twin.num_computed, twin.ahead, twin.num_published = self.num_computed, list(self.ahead), self.num_published",
        "twin.ahead, twin.num_published = list(self.ahead), self.num_published",
        "states",
    ),
    _mutant(
        "two states share the list of tokens ahead",
        "cache/state.py",
        "self.num_computed, list(self.ahead), self.num_published",
        "self.num_computed, self.ahead, self.num_published",
        "states",
    ),
    _mutant(
        "added layers are left behind when blocks are copied",
        "cache/memory.py",
        "        for layers in self.added:\n",
        "        for layers in ():\n",
        "added_layers",
    ),
    _mutant(
        "a hit goes further than added layers hold",
        "cache/blocks.py",
        "if block is None or not needs <= self._held[block]:",
        "if block is None:",
        "added_layers",
    ),
    _mutant(
        "a block that holds less is never replaced",
        "cache/blocks.py",
        "if key is not None and (twin is None or not self._held[block] <= self._held[twin]):",
        "if key is not None and twin is None:",
        "added_layers",
    ),
    _mutant(
        "the feature of a block is that of the token before its last",
        "cache/memory.py",
        "features[[end - stop - 1 for end in ends]]",
        "features[[end - stop - 2 for end in ends]]",
        "added_layers",
    ),
    _mutant(
        "KV of other rotary factors is kept",
        "cache/state.py",
        "        self.free()\n        self.long_rope = not self.long_rope\n",
        "        self.long_rope = not self.long_rope\n",
        "longrope",
    ),
    _mutant(
        "rejected rows count as computed",
        "engine/committing.py",
        "*(item.num_rows + node for node in accepted)])",
        "*(item.num_rows + node for node in range(len(step.draft)))])",
        "cache_truth",
    ),
    _mutant(
        "rows after a resumed pass begin with the embeddings",
        "model/target.py",
        "PartialPass(chosen, hidden))",
        "PartialPass(chosen, None))",
        "partial_passes",
    ),
    _mutant(
        "a proposer may write over the text",
        "model/target.py",
        "        if type(rows.start) is not int or rows.start < kv.num_computed:\n",
        "        if False:\n",
        "texts_are_not_written_over",
    ),
    # -- rows that come back --
    _mutant(
        "rows of the draft come back with wrong parents",
        "propose/host.py",
        "[root if parent < 0 else first_node + parent for parent in draft.row_parents]",
        "[root if parent < 0 else root + parent for parent in draft.row_parents]",
        "rejected_rows",
    ),
    _mutant(
        "rows come back with the position of their slot",
        "propose/host.py",
        "depths.append(row if row < num_due else depths[parent] + 1)",
        "depths.append(row)",
        "scratch_rows",
    ),
    _mutant(
        "statuses of draft rows are off by one",
        "propose/host.py",
        "RowStatus.ACCEPTED if node in accepted",
        "RowStatus.ACCEPTED if node - 1 in accepted",
        "needs_uncached_prompt",
    ),
    _mutant(
        "the first rejected row is shown as accepted",
        "propose/host.py",
        "RowStatus.ACCEPTED if node in accepted",
        "RowStatus.ACCEPTED if node <= len(accepted)",
        "needs_uncached_prompt",
    ),
    _mutant(
        "a proposer that needs every row gets prefix hits",
        "engine/scheduler.py",
        "return not seq.reads_every_row and seq.request",
        "return seq.request",
        "needs_uncached_prompt",
    ),
    _mutant(
        "every sample is told to begin",
        "engine/drafting/proposers.py",
        "copy.proposer.fork(parent.view, child.view)",
        "copy.proposer.begin(child.view)",
        "needs_uncached_prompt",
    ),
    _mutant(
        "scratch rows counted as draft tokens",
        "engine/committing.py",
        "seq.stats.observe_draft(len(draft), draft.depth",
        "seq.stats.observe_draft(draft.num_rows, draft.depth",
        "scratch_rows",
    ),
    _mutant(
        "scratch rows verified as draft tokens",
        "propose/host.py",
        '            return draft.with_scratch(row), f"scratch row {row}: {problem}"\n    return draft, None\n',
        '            return draft.with_scratch(row), f"scratch row {row}: {problem}"\n'
        "    laws = draft.laws + (Law.OPAQUE,) * len(scratch)\n"
        "    return Draft(draft.row_token_ids, draft.row_parents, laws, draft.draft_probs), None\n",
        "scratch_rows",
    ),
    _mutant(
        "tokens behind an end are counted as accepted",
        "engine/committing.py",
        "observe_draft(len(draft), draft.depth, num_accepted,",
        "observe_draft(len(draft), draft.depth, len(verdict.path),",
        "ends_inside_drafts",
    ),
    _mutant(
        "tokens behind an end are shown as accepted",
        "engine/committing.py",
        "return verdict.path[:num_accepted]",
        "return verdict.path",
        "ends_inside_drafts",
    ),
    # -- heads --
    _mutant(
        "heads read the row before",
        "propose/row_heads.py",
        "seen.aux_hidden_states[self._layer][row]",
        "seen.aux_hidden_states[self._layer][row - 1]",
        "heads_read_the_last_row",
    ),
    _mutant(
        "heads read rejected rows",
        "propose/row_heads.py",
        "seen.where(RowStatus.TEXT, RowStatus.ACCEPTED)",
        "seen.where(RowStatus.TEXT, RowStatus.ACCEPTED, RowStatus.REJECTED)",
        "heads_read_the_last_row",
    ),
    _mutant(
        "heads read what they saw first",
        "propose/row_heads.py",
        "LastState(last, hidden.clone())",
        "LastState(last, self._features.get(seen.sequence.seq_id, LastState(0, hidden.clone())).hidden)",
        "heads_read_the_last_row",
    ),
    _mutant(
        "heads begin with the first head behind another draft",
        "propose/row_heads.py",
        "logits[each.start : each.stop, i]",
        "logits[: each.stop, i]",
        "heads_go_on_behind_others",
    ),
    _mutant(
        "samples do not take over what was seen of their prompt",
        "propose/row_heads.py",
        "self._features[child.seq_id] = self._features[parent.seq_id]",
        "pass",
        "samples_of_heads_begin_at_once",
    ),
    _mutant(
        "the final norm is forgotten",
        "heads/checkpoint.py",
        "return target.norm(hidden) if config.normed and not normed_already else hidden",
        "return hidden",
        "exits_read_what_layers_leave",
        Refusal(
            "HeadMismatchError", "the hidden states of", "heads bring what the target's layers must leave with its norm"
        ),
    ),
    _mutant(
        "an exit reads rows of another node",
        "propose/own_layers.py",
        "out.hidden[end - count : end] for count, (_, end)",
        "out.hidden[first : first + count] for count, (first, _)",
        "exits_read_what_layers_leave",
    ),
    _mutant(
        "heads for other weights are taken",
        "heads/checkpoint.py",
        "    if not distance <= TOLERANCE:",
        "    if not distance <= 1e9:",
        "heads_for_other_weights",
    ),
    _mutant(
        "heads report a softer law than the one drawn from",
        "propose/trees/growth.py",
        "probs = torch.stack([self.laws[n.parent].row for n in self.nodes])",
        "probs = torch.nn.functional.normalize(torch.stack([self.laws[n.parent].row for n in self.nodes]).sqrt(), 1)",
        "heads_drawn",
    ),
)
