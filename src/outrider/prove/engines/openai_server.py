"""An OpenAI-compatible server under proof: sampled, with the power stated.

The law that texts ought to have is what the server itself reports (`logprobs`) or, given the weights, what the stock
transformers model computes. Everything is sent at temperature 1 without filters, where reported and sampled laws coincide.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from outrider.errors import EngineAnswerError
from outrider.model.hf import without_bars
from outrider.prove.engines.cells import LawOf, Text, finding, judge
from outrider.prove.engines.completions import Answer, CompletionsClient
from outrider.prove.report import Finding
from outrider.prove.runner import Proof

#: Reported probabilities may move by this much with the batch, as they do in bfloat16.
SPREAD = 0.02
#: A greedy token may be this much less likely than the best one: two nearly equal ones swap in narrow types.
TIE = 0.02

Prompt = str | tuple[int, ...]

PROMPTS: tuple[str, ...] = (
    "The weather in spring is",
    "def read(path):\n",
    "Once upon a time there was a",
    "1, 2, 3, 4,",
)


class ServerProof:
    """A server whose speculation is on, and what may be compared with it.

    Args:
        client: Asks with speculation.
        plain: Asks without, the same server or another one; None where nobody can.
        weights: The law of the target from its weights; None takes what the server reports.
        prompts: Put to it; two for the law and all for identity.
        num_texts: Sampled for each law.
        length: Tokens of each sampled text.
    """

    def __init__(
        self,
        client: CompletionsClient,
        plain: CompletionsClient | None = None,
        weights: WeightsLaw | None = None,
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
        """Ask for one token each way, so that what cannot work fails once. Raises EngineAnswerError."""
        for client in filter(None, (self._client, self._plain)):
            client.complete(self._prompts[:1], max_tokens=1, temperature=0.0)

    def proofs(self, *, quick: bool) -> Sequence[Proof]:
        """See OtherEngine."""
        num_texts = self._num_texts or (1000 if quick else 4000)
        asked = self._prompts[: 1 if quick else 2]
        found: list[Proof] = [(f"law of the texts behind {p!r}", partial(self.prove_law, p, num_texts)) for p in asked]
        found.append(("reported probabilities agree with each other", partial(self.prove_reported, asked, num_texts)))
        found.append(("greedy tokens are the likeliest", self.prove_greedy_tokens))
        found.append(("greedy text repeats", partial(self.prove_text, None, 0.0)))
        found.append(("seeded text repeats", partial(self.prove_text, None, 1.0)))
        if self._plain is not None:
            found.append(("greedy text is the plain one", partial(self.prove_text, self._plain, 0.0)))
            found.append(("seeded text is the plain one", partial(self.prove_text, self._plain, 1.0)))
        return found

    # -- laws ----------------------------------------------------------------------------------------------------------

    def prove_law(self, prompt: Prompt, num_texts: int) -> Finding:
        """The chi-square of sampled texts; measured is its p-value."""
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
        return finding(judge([a.tokens for a in answers], reported.law, self._length), num_texts, self._length)

    def prove_reported(self, prompts: Sequence[Prompt], num_texts: int) -> Finding:
        """How far the probabilities reported behind the same text contradict each other."""
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
        """Tokens of greedy texts that the law puts clearly behind another."""
        answers = self._client.complete(self._prompts, **_request(0.0))
        wrong = compared = 0
        for prompt, answer in zip(self._prompts, answers, strict=True):
            for row, (token, law) in enumerate(self._rows(prompt, answer)):
                wrong += law.get(token, 0.0) < max(law.values()) - TIE
                compared = max(compared, row + 1)
        source = "reported" if self._weights is None else "by the weights"
        return Finding(
            wrong, 0.0, f"{len(answers)} texts of up to {compared} tokens, likeliest {source}", compared > 0 and not wrong
        )

    def prove_text(self, other: CompletionsClient | None, temperature: float) -> Finding:
        """Texts that differ between all at once and one by one, or between here and `other`; seeded ones only inform."""
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
            return zip(answer.tokens, answer.laws, strict=True)
        law, ids = self._weights.behind(prompt), self._weights.ids(answer)
        return [(token, law(ids[:row]) or {}) for row, token in enumerate(ids)]


class Reported:
    """The law that a server reports along its texts.

    Args:
        answers: To one prompt.
    """

    def __init__(self, answers: Iterable[Answer]) -> None:
        self._seen: dict[Text, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for answer in answers:
            for row, law in enumerate(answer.laws):
                for token, probability in law.items():
                    self._seen[answer.tokens[:row]][token].append(probability)

    def law(self, start: Text) -> dict[str, float] | None:
        """Mean of the reports; None behind a text that nobody wrote on."""
        if start not in self._seen:
            return None
        return {token: sum(values) / len(values) for token, values in self._seen[start].items()}

    @property
    def contradiction(self) -> float:
        """How far this is from a law: two reports of one probability differ, or one text's probabilities exceed 1."""
        spreads = [max(v) - min(v) for laws in self._seen.values() for v in laws.values()]
        excesses = [sum((self.law(start) or {}).values()) - 1.0 for start in self._seen]
        return max([0.0, *spreads, *excesses])


class WeightsLaw:
    """The target's law from its own weights, by the stock transformers model in float32.

    Args:
        path: Local folder or hub id.
    """

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        with without_bars():
            self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError):
            self._tokenizer = None
        self._laws: dict[tuple[int, ...], dict[int, float]] = {}

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt; a model without a tokenizer gets characters taken into its vocabulary."""
        if not isinstance(prompt, str):
            return tuple(prompt)
        if self._tokenizer is not None:
            return tuple(self._tokenizer.encode(prompt))
        return tuple(ord(character) % self._model.config.vocab_size for character in prompt)

    def ids(self, answer: Answer) -> tuple[int, ...]:
        """Token ids of an answer. Raises EngineAnswerError where the server does not tell them."""
        if answer.token_ids is None:
            raise EngineAnswerError(
                "server",
                "answers without token ids, so its texts cannot be put to the weights",
                "Ask for them (vLLM: --body '{\"return_token_ids\": true}'), or leave --weights out.",
            )
        return answer.token_ids

    def behind(self, prompt: Prompt) -> LawOf:
        """The law of what follows `prompt`."""
        encoded = self.encode(prompt)
        return lambda start: self.row(encoded + start)

    def row(self, ids: tuple[int, ...]) -> dict[int, float]:
        """Law of the token that follows `ids`."""
        if ids not in self._laws:
            with torch.inference_mode():
                logits = self._model(torch.tensor([ids])).logits[0, -1]
            self._laws[ids] = dict(enumerate(logits.double().softmax(-1).tolist()))
        return self._laws[ids]


def _request(temperature: float) -> dict[str, Any]:
    return {"max_tokens": 24, "temperature": temperature, **({"seed": 1234} if temperature else {})}
