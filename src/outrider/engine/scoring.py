"""Computes logprobs of the tokens that a step commits, for requests that asked for them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from outrider.engine.sequence import Sequence
from outrider.verify.logprobs import Decode, positions, processed_logprobs, raw_logprobs
from outrider.verify.verifier import Candidate

Written = Seq[tuple[int, int]]


def score(seq: Sequence, candidate: Candidate, written: Written, raw: Tensor, processed: Tensor, decode: Decode) -> None:
    """Record the logprobs of tokens that were written.

    Args:
        seq: Whose.
        candidate: Its draft and its rows.
        written: Each token, with the node of the draft that it follows (-1: the committed text).
        raw: [num_logits, vocab_size] of the target.
        processed: [num_logits, vocab_size] as the parameters left them.
        decode: Text of a token.
    """
    params = seq.request.params
    if params.logprobs is None or not written:
        return
    rows = torch.tensor([node + 1 for node, _ in written], device=raw.device) + candidate.rows[0]
    logprobs = raw_logprobs(raw[rows]) if params.logprobs_mode == "raw" else processed_logprobs(processed[rows], params)
    seq.logprobs += positions(logprobs, [token for _, token in written], params.logprobs, decode)


def score_prompt(seq: Sequence, start: int, num_rows: int, logits: Tensor, decode: Decode) -> None:
    """Record the logprobs of the prompt's tokens, for whom asked; a prompt that is computed again after a preemption has
    them already.

    Args:
        seq: Whose; a request's first sample scores the prompt for all.
        start: Position of the first row.
        num_rows: Rows of the prompt.
        logits: [num_rows or more, vocab_size] raw, from `start` on.
        decode: Text of a token.
    """
    count = seq.request.params.prompt_logprobs
    if count is None or seq.index != 0:
        return
    scores, prompt = seq.request.prompt_logprobs, seq.request.prompt_token_ids
    skip = len(scores) - 1 - start
    tokens = prompt[start + 1 : start + 1 + num_rows]
    if 0 <= skip < len(tokens):
        scores += positions(raw_logprobs(logits[skip : len(tokens)]), tokens[skip:], count, decode)
