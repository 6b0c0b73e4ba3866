"""The reference for proofs on real checkpoints: the stock model, with one forward pass for each context.

The sampling parameters are applied in plain Python, by their definitions. None of this code is shared with the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import exp

import torch

from outrider.model.loading.exclusive import exclusive_transformers
from outrider.params import SamplingParams
from outrider.prove.forking import Outcome
from outrider.prove.tiny import PIECES, raise_norms

Context = tuple[int, ...]


class TeacherForced:
    """A checkpoint that runs in transformers alone, in float64.

    Args:
        path: The path of the checkpoint.
        end_token_ids: The tokens that end a text.
    """

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
        """The joint distribution of the samples that `params` asks for. They are independent, and each ends by itself.

        Args:
            prompt: Token ids; of a model with an encoder, those that it reads.
            params: What the engine is asked for.
            language: Every text that `params.structured_outputs` admits; () where no structure is asked for.
        """
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
                ends = len(text) >= params.max_tokens or token in stops or _has_stop_string(text, params)
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
    """The probabilities of one row after all sampling parameters.

    Args:
        logits: The logits of the model [vocab_size].
        params: The parameters.
        prompt: Tokens of the prompt.
        written: The output tokens so far.
        stops: The tokens that end the text.
        allowed: The tokens that the structure admits next. None where no structure is asked for.
    """
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


def _has_stop_string(text: Context, params: SamplingParams) -> bool:
    return bool(params.stop) and any(stop in "".join(PIECES[t] for t in text) for stop in params.stop)


def _may_follow(written: Context, language: Sequence[str]) -> set[int]:
    """Tokens after which a text of the language is still possible. The last piece ends a text."""
    text = "".join(PIECES[t] for t in written)
    end = len(PIECES) - 1
    going_on = {t for t in range(end) if any(whole.startswith(text + PIECES[t]) for whole in language)}
    return going_on | ({end} if text in language else set())
