"""Tests the production random numbers by chi-square, against the stock model's own probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import exp

import numpy as np
import torch
from torch import Tensor

from outrider.lab.prove.forking import Outcome
from outrider.lab.prove.running import Finding
from outrider.lab.prove.tiny import PIECES, raise_norms
from outrider.loading.exclusive import exclusive_transformers
from outrider.params import SamplingParams
from outrider.verify.noise import Stream, gumbel_max, invert_cdf, mix_fields, uniform
from outrider.verify.rules import block_acceptance, residual, token_acceptance

# --- Tests the production random numbers: a chi-square over millions of drafts against the target's distribution.
#
# Enumeration proves the rules, and this proves the random numbers that drive them. Only this test sees correlated keys,
# biased uniform numbers, or a generator that repeats itself.


VOCAB, NUM_DRAFT, NUM_TOKENS = 4, 2, 3
_SLICE = 250_000

#: Returns random bits [n] int64 for a stream and a position of the requests with the given seeds. Tests pass faulty ones.
Bits = Callable[[np.ndarray, Stream, int], Tensor]


def production_bits(seeds: np.ndarray, stream: Stream, position: int) -> Tensor:
    """The bits that KeyedNoise uses in the first round of requests with these seeds."""
    fields = np.zeros((len(seeds), 5), np.uint64)
    fields[:, 0], fields[:, 2], fields[:, 3] = seeds, int(stream), position
    return torch.from_numpy(mix_fields(fields))


#: A correct engine fails the chi-square once in a million runs.
SIGNIFICANCE = 1e-6


def prove_sampled(rule: str, num_samples: int) -> Finding:
    """`sample_p_value` as a finding. It measures the p-value, which must stay above the bound."""
    p_value = sample_p_value(rule, num_samples)
    detail = f"p-value must exceed the bound: {num_samples:,} samples of three tokens, production random numbers"
    return Finding(p_value, SIGNIFICANCE, detail, p_value > SIGNIFICANCE)


def sample_p_value(rule: str, num_samples: int, bits: Bits = production_bits) -> float:
    """The p-value of the first three tokens of many requests under the joint distribution of the target. The tokens are
    drafted and verified."""
    generator = torch.Generator().manual_seed(1)
    target = torch.rand(VOCAB, VOCAB, VOCAB, VOCAB, generator=generator, dtype=torch.float64) + 0.05
    draft = torch.rand(VOCAB, VOCAB, VOCAB, VOCAB, generator=generator, dtype=torch.float64) + 0.05
    target, draft = target / target.sum(-1, keepdim=True), draft / draft.sum(-1, keepdim=True)
    counts = torch.zeros(VOCAB**NUM_TOKENS, dtype=torch.float64)
    for first in range(0, num_samples, _SLICE):
        seeds = np.arange(first, min(first + _SLICE, num_samples), dtype=np.uint64)
        text = _texts(rule, seeds, target, draft, bits)
        index = (text * torch.tensor([VOCAB**2, VOCAB, 1])).sum(-1)
        counts += torch.bincount(index, minlength=VOCAB**NUM_TOKENS)
    return chi_square(counts, _joint(target).flatten() * num_samples)


def _probs(table: Tensor, text: Tensor, position: int) -> Tensor:
    """The probabilities [n, VOCAB] of the token at `position`, given up to two tokens before it."""
    empty = torch.zeros(len(text), dtype=torch.long)
    before = [text[:, i] if i < position else empty for i in range(2)]
    return table[before[0], before[1], position % VOCAB]


def _joint(table: Tensor) -> Tensor:
    """The joint distribution [VOCAB, VOCAB, VOCAB] of three tokens that the target writes alone."""
    a = table[0, 0, 0]
    b = table[:, 0, 1]
    c = table[:, :, 2]
    return a[:, None, None] * b[:, :, None] * c


def _texts(rule: str, seeds: np.ndarray, target: Tensor, draft: Tensor, bits: Bits) -> Tensor:
    """The three tokens [n, 3] that each request writes."""
    guess, q = _drafts(seeds, draft, bits, coupled=rule == "coupled")
    p = torch.stack([_probs(target, guess, i) for i in range(NUM_DRAFT + 1)], 1)
    accepted, following = _verify(rule, seeds, p, q, guess, bits)
    text = torch.cat([guess, guess[:, :1]], 1)
    lane = torch.arange(len(seeds))
    if following is None:  # a walk draws at every row, and the first token that differs ends the draft
        drawn = [gumbel_max(p[:, i], bits(seeds, Stream.TARGET, i)) for i in range(NUM_DRAFT + 1)]
        stays = torch.stack([drawn[i] == guess[:, i] for i in range(NUM_DRAFT)], 1)
        accepted = stays.long().cumprod(1).sum(1)
        text[lane, accepted] = torch.stack(drawn, 1)[lane, accepted]
    else:
        recovered = invert_cdf(following, _select(accepted, lambda i: bits(seeds, Stream.RECOVER, i)))
        bonus = gumbel_max(following, bits(seeds, Stream.TARGET, NUM_DRAFT))
        text[lane, accepted] = torch.where(accepted == NUM_DRAFT, bonus, recovered)
    for position in range(1, NUM_TOKENS):  # later rounds are decoded plainly
        due = position > accepted
        plain = gumbel_max(_probs(target, text, position), bits(seeds, Stream.TARGET, position))
        text[:, position] = torch.where(due, plain, text[:, position])
    return text


def _drafts(seeds: np.ndarray, draft: Tensor, bits: Bits, *, coupled: bool) -> tuple[Tensor, Tensor]:
    guess, rows = torch.zeros(len(seeds), NUM_DRAFT, dtype=torch.long), []
    for i in range(NUM_DRAFT):
        probs = _probs(draft, guess, i)
        stream = Stream.TARGET if coupled else Stream.DRAFT
        guess[:, i] = (gumbel_max if coupled else invert_cdf)(probs, bits(seeds, stream, i))
        rows.append(probs)
    return guess, torch.stack(rows, 1)


def _verify(rule: str, seeds: np.ndarray, p: Tensor, q: Tensor, guess: Tensor, bits: Bits) -> tuple[Tensor, Tensor | None]:
    """Accepted lengths [n] and the probabilities of the next token [n, VOCAB]; None for the walk."""
    lane = torch.arange(len(seeds))
    if rule in ("walk", "coupled"):
        return torch.zeros(len(seeds), dtype=torch.long), None
    u = torch.stack([uniform(bits(seeds, Stream.ACCEPT, i)) for i in range(NUM_DRAFT)], 1)
    if rule == "token":
        accepted = (u < token_acceptance(p, q, guess)).long().cumprod(1).sum(1)
        weights = torch.ones(len(seeds), NUM_DRAFT + 1, dtype=p.dtype)
    else:
        chances, weights = block_acceptance(p, q, guess)
        accepted = ((u < chances) * torch.arange(1, NUM_DRAFT + 1)).amax(1)
    q_next = torch.cat([q, torch.zeros_like(q[:, :1])], 1)[lane, accepted]
    return accepted, residual(p[lane, accepted], q_next, weights[lane, accepted])


def _select(index: Tensor, column: Callable[[int], Tensor]) -> Tensor:
    table = torch.stack([column(i) for i in range(NUM_DRAFT + 1)], 1)
    return table[torch.arange(len(index)), index]


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """The p-value of Pearson's statistic for `counts` against `expected`, both [num_cells] and with the same sum."""
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


# --- The reference for proofs on real checkpoints: the stock model, with one forward pass for each context.
#
# The sampling parameters are applied in plain Python, by their definitions. None of this code is shared with the
# engine.


Context = tuple[int, ...]


class TeacherForced:
    """A checkpoint that runs in transformers alone, in float64."""

    def __init__(self, path: str, end_token_ids: Sequence[int] = ()) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

        with exclusive_transformers():
            self._reads_source = AutoConfig.from_pretrained(path).is_encoder_decoder
            auto = AutoModelForSeq2SeqLM if self._reads_source else AutoModelForCausalLM
            self._model = auto.from_pretrained(path, dtype=torch.float64).eval()
        self._ends = tuple(end_token_ids)
        raise_norms(self._model)
        self._logits: dict[tuple[Context, Context], list[float]] = {}

    def distribution(self, prompt: Context, params: SamplingParams, language: Sequence[str] = ()) -> dict[Outcome, float]:
        """The joint distribution of the samples that `params` asks for. They are independent, and each ends by itself."""
        source: Context = ()
        if self._reads_source:
            source, prompt = prompt, (self._model.config.decoder_start_token_id,)
        one: dict[Context, float] = {}
        alive: dict[Context, float] = {(): 1.0}
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else self._ends)}
        while alive:
            written, weight = alive.popitem()
            allowed = _may_follow(written, language) if language else None
            probs = process(self.logits(prompt + written, source), params, prompt, written, stops, allowed)
            for token, p in enumerate(probs):
                text = (*written, token)
                ends = (
                    len(text) >= params.max_tokens
                    or token in stops
                    or any(stop in "".join(PIECES[t] for t in text) for stop in params.stop or ())
                )
                if p > 0.0:
                    (one if ends else alive)[text] = weight * p
        joint: dict[Outcome, float] = {}
        for texts in product(one, repeat=params.n):
            weight = 1.0
            for text in texts:
                weight *= one[text]
            joint[texts] = weight
        return joint

    def logits(self, tokens: Context, source: Context = ()) -> list[float]:
        """The logits of the next token [vocab_size], behind a source where there is an encoder."""
        if (source, tokens) not in self._logits:
            text = torch.tensor([tokens])
            inputs = {"input_ids": torch.tensor([source]), "decoder_input_ids": text} if source else {"input_ids": text}
            with torch.inference_mode():
                self._logits[source, tokens] = self._model(**inputs).logits[0, -1].tolist()
        return self._logits[source, tokens]


def process(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Context,
    written: Context,
    stops: set[int],
    allowed: set[int] | None = None,
) -> list[float]:
    """The probabilities of one row of logits [vocab_size] after all sampling parameters. A structure admits the allowed
    tokens alone; None where no structure is asked for."""
    scores = _penalised([x + params.logit_bias.get(t, 0.0) for t, x in enumerate(logits)], params, prompt, written)
    for processor in params.logits_processors:
        ids = torch.tensor([[*prompt, *written]])
        scores = processor(ids, torch.tensor([scores], dtype=torch.float64))[0].tolist()
    forbidden = {
        word[-1]
        for word in params.bad_words_ids
        if (*prompt, *written)[len(prompt + written) - len(word) + 1 :] == word[:-1]
    }
    forbidden |= stops if len(written) < params.min_tokens else set()
    if params.allowed_token_ids is not None:
        forbidden |= set(range(len(scores))) - set(params.allowed_token_ids)
    if allowed is not None:
        forbidden |= set(range(len(scores))) - allowed
    alive = {t: x for t, x in enumerate(scores) if t not in forbidden}
    if params.greedy:
        best = max(alive, key=lambda t: (alive[t], -t))
        return [float(t == best) for t in range(len(scores))]
    return _filtered(alive, params, len(scores))


def _penalised(scores: list[float], params: SamplingParams, prompt: Context, written: Context) -> list[float]:
    result = []
    for token, score in enumerate(scores):
        if token in prompt or token in written:
            score = score / params.repetition_penalty if score > 0 else score * params.repetition_penalty
        times = written.count(token)
        result.append(score - params.frequency_penalty * times - params.presence_penalty * (times > 0))
    return result


def _filtered(alive: dict[int, float], params: SamplingParams, vocab_size: int) -> list[float]:
    top = max(alive.values())
    odds = {t: exp((x - top) / params.temperature) for t, x in alive.items()}
    if params.top_k > 0:
        edge = sorted(odds.values(), reverse=True)[: params.top_k][-1]
        odds = {t: x for t, x in odds.items() if x >= edge}
    if params.top_p < 1.0:
        total, mass, kept = sum(odds.values()), 0.0, {}
        for t in sorted(odds, key=lambda t: (-odds[t], t)):
            if mass / total < params.top_p:
                kept[t] = odds[t]
            mass += odds[t]
        odds = kept
    odds = {t: x for t, x in odds.items() if x >= params.min_p * max(odds.values())}
    total = sum(odds.values())
    return [odds.get(t, 0.0) / total for t in range(vocab_size)]


def _may_follow(written: Context, language: Sequence[str]) -> set[int]:
    """Tokens after which a text of the language is still possible. The last piece ends a text."""
    text = "".join(PIECES[t] for t in written)
    end = len(PIECES) - 1
    going_on = {t for t in range(end) if any(whole.startswith(text + PIECES[t]) for whole in language)}
    return going_on | ({end} if text in language else set())
