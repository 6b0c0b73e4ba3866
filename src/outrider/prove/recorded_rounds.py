"""A text that is drafted and verified without an engine, for proofs of the Verifier."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.cache.blocks import BlockManager
from outrider.cache.memory import StateMemory
from outrider.cache.state import KVView
from outrider.draft import Draft
from outrider.params import SamplingParams
from outrider.propose.base import ProposeRequest, ProposerSequence, Tokens
from outrider.verify.processing import Processing
from outrider.verify.verifier import Candidate, CandidateKeys, RuleName, Verdict, rule_for

_PROMPT = (0,)


@dataclass
class WrittenText:
    """A prompt of one token, and the text behind it.

    Attributes:
        view: The sequence as proposers see it.
        tokens: All tokens, the prompt's included.
        rule: The rule that verifies its drafts.
    """

    view: ProposerSequence
    tokens: list[int]
    rule: RuleName

    @staticmethod
    def begin(seq_id: int, rule: RuleName) -> WrittenText:
        """A text without output."""
        tokens, params = list(_PROMPT), SamplingParams(max_tokens=64)
        shown = Tokens(tokens)
        kv = KVView(StateMemory(BlockManager(1, 1)).state())  # nothing is ever kept in it
        view = ProposerSequence(seq_id, shown, len(_PROMPT), params, Processing(params, shown, 1), 0, 0, kv)
        return WrittenText(view, tokens, rule)

    @property
    def output(self) -> tuple[int, ...]:
        """The tokens behind the prompt."""
        return tuple(self.tokens[len(_PROMPT) :])

    @property
    def request(self) -> ProposeRequest:
        """The request for a draft."""
        return ProposeRequest(self.view, 64, coupled=self.rule == "coupled")

    def candidate(self, draft: Draft, rows: tuple[int, int]) -> Candidate:
        """A draft for this text as the Verifier takes it; `rows` are the first row and the row after the last."""
        view = self.view
        keys = CandidateKeys(view.seq_id, view.seed, view.sample, view.round, len(self.tokens))
        rule = rule_for(draft, self.rule, coupled=self.rule == "coupled")
        return Candidate(draft, rows, view.sampling, keys, rule)

    def commit(self, draft: Draft, verdict: Verdict) -> None:
        """Append the draft tokens that stand, and the token behind them."""
        self.tokens += [*(draft.token_ids[node] for node in verdict.path), verdict.token_id]
        self.view.round += 1
