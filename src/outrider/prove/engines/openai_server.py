"""Proofs on an OpenAI-compatible server. Its texts are sampled, and the proofs report their power.

The texts ought to follow the probabilities that the server itself reports (`logprobs`) or, where the weights are given,
those that the stock transformers model computes. All requests have temperature 1 and no filters, since there the reported
probabilities are those that the server draws from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from outrider.errors import EngineAnswerError
from outrider.model.loading.exclusive import exclusive_transformers
from outrider.prove.engines.cells import ProbsOf, Text, finding, judge
from outrider.prove.engines.completions import Answer, CompletionsClient
from outrider.prove.findings import Finding
from outrider.prove.running import Proof

#: Reported probabilities may differ by this much from batch to batch, as they do in bfloat16.
SPREAD = 0.02
#: A greedy token may be less likely than the best one by this much, since narrow types swap two nearly equal tokens.
TIE = 0.02

Prompt = str | tuple[int, ...]

PROMPTS: tuple[str, ...] = (
    "The weather in spring is",
    "def read(path):\n",
    "Once upon a time there was a",
    "1, 2, 3, 4,",
)


class ServerProof:
    """A server that speculates, and what its texts are compared with.

    Args:
        client: Asks the server with speculation.
        plain: Asks the same server or another one without speculation. None where that is not possible.
        weights: The target itself, as the reference. None takes the probabilities that the server reports.
        prompts: The prompts. Two of them are sampled, and identical texts are checked on all.
        num_texts: The number of texts that are sampled behind each of the two prompts.
        length: The number of tokens of each sampled text.
    """

    def __init__(
        self,
        client: CompletionsClient,
        plain: CompletionsClient | None = None,
        weights: ReferenceModel | None = None,
        *,
        prompts: Sequence[Prompt] = PROMPTS,
        num_texts: int | None = None,
        length: int = 4,
    ) -> None:
        self.title = f"{client.name()} at {client.url}"
        self._client, self._plain, self._weights = client, plain, weights
        self._prompts = [p if weights is None else weights.encode(p) for p in prompts]
        self._num_texts, self._length = num_texts, length
        self._sampled: dict[Prompt, list[Answer]] = {}

    def reach(self) -> None:
        """Ask for one token with and without speculation, so that a server that cannot answer fails only once.

        Raises:
            EngineAnswerError: The server cannot answer.
        """
        for client in filter(None, (self._client, self._plain)):
            client.complete(self._prompts[:1], max_tokens=1, temperature=0.0)

    def proofs(self, *, quick: bool) -> Sequence[Proof]:
        """See OtherEngine."""
        num_texts = self._num_texts or (1000 if quick else 4000)
        asked = self._prompts[: 1 if quick else 2]
        found: list[Proof] = [
            (f"distribution of the texts behind {p!r}", partial(self.prove_distribution, p, num_texts)) for p in asked
        ]
        found.append(("reported probabilities agree with each other", partial(self.prove_reported, asked, num_texts)))
        found.append(("greedy tokens are the likeliest", self.prove_greedy_tokens))
        found.append(("greedy text repeats", partial(self.prove_text, None, 0.0)))
        found.append(("seeded text repeats", partial(self.prove_text, None, 1.0)))
        if self._plain is not None:
            found.append(("greedy text is the plain one", partial(self.prove_text, self._plain, 0.0)))
            found.append(("seeded text is the plain one", partial(self.prove_text, self._plain, 1.0)))
        return found

    # -- joint distributions -------------------------------------------------------------------------------------------

    def prove_distribution(self, prompt: Prompt, num_texts: int) -> Finding:
        """Sampled texts follow the probabilities of the target; the finding measures the p-value of a chi-square."""
        answers = self._texts(prompt, num_texts)
        drafted = [answer.num_drafted for answer in answers if answer.num_drafted is not None]
        if drafted and not sum(drafted):
            return Finding(
                float("nan"), 0.0, "the server verified no draft token, so there is nothing to prove", holds=False
            )
        if self._weights is not None:
            texts = [self._weights.ids(answer) for answer in answers]
            return finding(judge(texts, self._weights.behind(prompt), self._length), num_texts, self._length)
        reported = Reported(answers)
        if reported.contradiction > SPREAD:
            raise EngineAnswerError(
                self._client.url,
                f"reports probabilities behind one text that contradict each other by {reported.contradiction:.2g}",
                "Give the weights with --weights.",
            )
        return finding(judge([a.tokens for a in answers], reported.probs, self._length), num_texts, self._length)

    def prove_reported(self, prompts: Sequence[Prompt], num_texts: int) -> Finding:
        """Probabilities that the server reports behind the same text agree with each other."""
        spread = max(Reported(self._texts(prompt, num_texts)).contradiction for prompt in prompts)
        detail = f"{len(prompts) * num_texts:,} answers, token by token"
        return Finding(spread, SPREAD, detail, informs=self._weights is not None)

    def _texts(self, prompt: Prompt, num_texts: int) -> list[Answer]:
        if len(self._sampled.get(prompt, ())) != num_texts:
            fields = {"max_tokens": self._length, "temperature": 1.0, "top_p": 1.0}
            self._sampled[prompt] = self._client.complete([prompt] * num_texts, **fields)
        return self._sampled[prompt]

    # -- texts ---------------------------------------------------------------------------------------------------------

    def prove_greedy_tokens(self) -> Finding:
        """No token of a greedy text is clearly less likely than another one."""
        answers = self._client.complete(self._prompts, **_request(0.0))
        wrong = compared = 0
        for prompt, answer in zip(self._prompts, answers, strict=True):
            for row, (token, probs) in enumerate(self._rows(prompt, answer)):
                wrong += probs.get(token, 0.0) < max(probs.values()) - TIE
                compared = max(compared, row + 1)
        source = "reported" if self._weights is None else "by the weights"
        return Finding(
            wrong, 0.0, f"{len(answers)} texts of up to {compared} tokens, likeliest {source}", compared > 0 and not wrong
        )

    def prove_text(self, other: CompletionsClient | None, temperature: float) -> Finding:
        """Texts that are written together equal those that are written alone, by `other` where that is given.

        A finding about seeded texts only informs, since nobody promises that they are equal.
        """
        seeded, fields = temperature > 0.0, _request(temperature)
        asked = other if other is not None else self._client
        try:
            together = self._client.complete(self._prompts, **fields)
            alone = [asked.complete([prompt], **fields)[0] for prompt in self._prompts]
        except EngineAnswerError as error:
            if not seeded:
                raise
            return Finding(float("nan"), 0.0, f"refused: {error}", informs=True)
        wrong = sum(a.text != b.text or a.tokens != b.tokens for a, b in zip(together, alone, strict=True))
        where = "alone" if other is None else "plainly and alone"
        detail = f"{len(alone)} texts of {fields['max_tokens']} tokens, together against {where}"
        return Finding(wrong, 0.0, f"{detail}; not promised" if seeded else detail, informs=seeded)

    def _rows(self, prompt: Prompt, answer: Answer) -> Iterable[tuple[Any, Mapping[Any, float]]]:
        if self._weights is None:
            return zip(answer.tokens, answer.probs, strict=True)
        probs_of, ids = self._weights.behind(prompt), self._weights.ids(answer)
        return [(token, probs_of(ids[:row]) or {}) for row, token in enumerate(ids)]


class Reported:
    """The probabilities that a server reports along its texts.

    Args:
        answers: Its answers to one prompt.
    """

    def __init__(self, answers: Iterable[Answer]) -> None:
        self._seen: dict[Text, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for answer in answers:
            for row, probs in enumerate(answer.probs):
                for token, probability in probs.items():
                    self._seen[answer.tokens[:row]][token].append(probability)

    def probs(self, start: Text) -> dict[str, float] | None:
        """The mean of the reports behind the first tokens `start`. None where no text went on."""
        if start not in self._seen:
            return None
        return {token: sum(values) / len(values) for token, values in self._seen[start].items()}

    @property
    def contradiction(self) -> float:
        """How much two reports of one probability differ, or how much the probabilities behind one text exceed 1."""
        spreads = [max(v) - min(v) for rows in self._seen.values() for v in rows.values()]
        excesses = [sum((self.probs(start) or {}).values()) - 1.0 for start in self._seen]
        return max([0.0, *spreads, *excesses])


class ReferenceModel:
    """The target itself: the stock transformers model with the same weights, in float32.

    Args:
        path: Local folder or hub id.
    """

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        with exclusive_transformers():
            self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError):
            self._tokenizer = None
        self._probs: dict[tuple[int, ...], dict[int, float]] = {}

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The token ids of a prompt. Without a tokenizer, each character becomes some token of the vocabulary."""
        if not isinstance(prompt, str):
            return tuple(prompt)
        if self._tokenizer is not None:
            return tuple(self._tokenizer.encode(prompt))
        return tuple(ord(character) % self._model.config.vocab_size for character in prompt)

    def ids(self, answer: Answer) -> tuple[int, ...]:
        """The token ids of an answer. Raises EngineAnswerError where the server does not tell them."""
        if answer.token_ids is None:
            raise EngineAnswerError(
                "server",
                "answers without token ids, so its texts cannot be put to the weights",
                "Ask for them (vLLM: --body '{\"return_token_ids\": true}'), or leave --weights out.",
            )
        return answer.token_ids

    def behind(self, prompt: Prompt) -> ProbsOf:
        """The probabilities of what follows `prompt`."""
        encoded = self.encode(prompt)
        return lambda start: self.row(encoded + start)

    def row(self, ids: tuple[int, ...]) -> dict[int, float]:
        """The probabilities of the token that follows `ids`."""
        if ids not in self._probs:
            with torch.inference_mode():
                logits = self._model(torch.tensor([ids])).logits[0, -1]
            self._probs[ids] = dict(enumerate(logits.double().softmax(-1).tolist()))
        return self._probs[ids]


def _request(temperature: float) -> dict[str, Any]:
    return {"max_tokens": 24, "temperature": temperature, **({"seed": 1234} if temperature else {})}
