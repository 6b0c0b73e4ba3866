"""Proofs on an OpenAI-compatible server: its client, and tests of sampled texts with their power."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from http.client import HTTPException
from typing import Any

import torch
from torch import Tensor

from outrider.errors import EngineAnswerError
from outrider.lab.peers.base import asked
from outrider.lab.prove.running import Finding, Proof
from outrider.lab.prove.sampled import SIGNIFICANCE, chi_square
from outrider.loading.exclusive import exclusive_transformers

# --- Proofs on an OpenAI-compatible server. Its texts are sampled, and the proofs report their power.
#
# The texts ought to follow the probabilities that the server itself reports (`logprobs`) or, where the weights are
# given, those that the stock transformers model computes. All requests have temperature 1 and no filters, since there
# the reported probabilities are those that the server draws from.


#: Reported probabilities may differ by this much from batch to batch, as they do in bfloat16.
SPREAD = 0.02
#: A greedy token may be less likely than the best one by this much, since narrow types swap two nearly equal tokens.
TIE = 0.02

Prompt = str | tuple[int, ...]

PROMPTS: tuple[str, ...] = ("The weather in spring is", "def read(path):\n", "Once upon a time there was a", "1, 2, 3, 4,")


class ServerProof:
    """A server that speculates, and what its texts are compared with: plain texts, where it or another server can be asked
    for them, and the target itself. Without weights the probabilities that the server reports are the reference."""

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
        """Ask for one token with and without speculation, so that a server that cannot answer fails only once."""
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
        """Texts that are written together equal those that are written alone, by `other` where that is given. A finding
        about seeded texts only informs, since nobody promises that they are equal."""
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
    """The probabilities that a server reports along its texts."""

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
        """Returns how much two reports of one probability differ, or how much the probabilities behind one text exceed
        1."""
        spreads = [max(v) - min(v) for rows in self._seen.values() for v in rows.values()]
        excesses = [sum((self.probs(start) or {}).values()) - 1.0 for start in self._seen]
        return max([0.0, *spreads, *excesses])


class ReferenceModel:
    """The target itself: the stock transformers model with the same weights, in float32."""

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


# --- A client for `/v1/completions` of any OpenAI-compatible server, with token probabilities.


#: The largest number that every server allows.
NUM_LOGPROBS = 5


@dataclass(frozen=True)
class Answer:
    """One completion."""

    text: str  # the text as a string
    tokens: tuple[str, ...]  # its tokens as strings. Some servers leave out the token that ended the text.
    token_ids: tuple[int, ...] | None  # the ids of the tokens. None where the server does not tell them.
    # For each token, the probabilities that the server reports for it and for its likeliest rivals.
    probs: tuple[Mapping[str, float], ...]
    # The number of draft tokens that were verified. None where the server does not tell (llama.cpp does).
    num_drafted: int | None = None


@dataclass(frozen=True)
class CompletionsClient:
    """A client for one model of one server."""

    url: str  # the address of the server, with or without `/v1`. The key is taken from OPENAI_API_KEY where that is set.
    model: str | None = None  # the name of the model in requests. None takes the first model that the server lists.
    body: Mapping[str, Any] = field(default_factory=dict)  # further fields of every request
    timeout: float = 120.0  # the number of seconds to wait for an answer
    concurrency: int = 16  # the largest number of requests at a time

    def name(self) -> str:
        """The name of the model. Raises EngineAnswerError where the server lists none."""
        if self.model is not None:
            return self.model
        listed = self._send("models", None)
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise EngineAnswerError(self.url, "lists no model", "Name one with --model.") from error

    def complete(self, prompts: Sequence[str | Sequence[int]], **fields: Any) -> list[Answer]:
        """One completion for each prompt, requested side by side."""
        common = {"model": self.name(), "logprobs": NUM_LOGPROBS, "stream": False, **fields, **self.body}

        def one(prompt: str | Sequence[int]) -> Answer:
            words = prompt if isinstance(prompt, str) else list(prompt)
            return self._read(self._send("completions", {**common, "prompt": words}))

        with ThreadPoolExecutor(self.concurrency) as pool:
            return list(pool.map(one, prompts))

    def _send(self, path: str, body: Mapping[str, Any] | None) -> Any:
        try:
            with asked(self.url.rstrip("/").removesuffix("/v1"), path, body, self.timeout) as answer:
                return json.load(answer)
        except (HTTPException, OSError) as error:
            raise EngineAnswerError(self.url, f"does not answer: {error}", "Is the server up?") from error
        except ValueError as error:
            raise EngineAnswerError(self.url, "does not answer in JSON", "Is it an OpenAI-compatible server?") from error

    def _read(self, answer: Any) -> Answer:
        try:
            choice = answer["choices"][0]
            reported = choice.get("logprobs") or {}
            tokens, ids, probs = _entries(reported) if "content" in reported else _columns(reported)
            ids = choice.get("token_ids", ids)
            num_drafted = answer["timings"].get("draft_n", 0) if "timings" in answer else None
            num_drafted = (
                answer["speculation"]["draft_tokens"] if "speculation" in answer else num_drafted
            )  # our own server
            return Answer(choice["text"], tokens, None if ids is None else tuple(ids), probs, num_drafted)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            remedy = "It must support `logprobs` in /v1/completions; some servers need a flag for it."
            raise EngineAnswerError(self.url, f"an answer without token probabilities ({error!r})", remedy) from error


_Parts = tuple[tuple[str, ...], tuple[int, ...] | None, tuple[dict[str, float], ...]]


def _columns(reported: Mapping[str, Any]) -> _Parts:
    """Read the older form of logprobs, which has parallel lists. It tells tokens apart by their strings alone."""
    tokens = tuple(reported["tokens"])
    probs = []
    for token, logprob, rivals in zip(tokens, reported["token_logprobs"], reported["top_logprobs"], strict=True):
        probs.append({rival: math.exp(value) for rival, value in {token: logprob, **rivals}.items()})
    named = all(token.startswith("token_id:") for token in tokens)  # vLLM names ids like this when it is asked to
    return tokens, tuple(int(token[9:]) for token in tokens) if named and tokens else None, tuple(probs)


def _entries(reported: Mapping[str, Any]) -> _Parts:
    """Read the form of the chat protocol, which llama.cpp uses for completions too. It has one entry for each token."""
    content = reported["content"]
    probs = tuple({_word(r): math.exp(r["logprob"]) for r in (*entry["top_logprobs"], entry)} for entry in content)
    ids = tuple(entry["id"] for entry in content) if content and all("id" in entry for entry in content) else None
    return tuple(map(_word, content)), ids, probs


def _word(entry: Mapping[str, Any]) -> str:
    return f"{entry['id']}:{entry['token']}" if "id" in entry else str(entry["token"])


# --- Compares sampled texts with probabilities that are known only along the texts: a chi-square over cells, and its power.
#
# The texts of a cell have the same first tokens. At a branching, one cell holds the texts that go on with any other
# token. The probabilities decide where to branch, and not the counts: a token gets a branch of its own where enough
# texts are expected to take it. So the statistic keeps its distribution. There is one exception, which favours the
# engine. Where a text has ended, tokens that no text has drawn count with the rest, since one of them is the end of
# text and the server does not name it.


Text = tuple[Any, ...]
#: The probabilities of the next token behind the first tokens of a text, at least those of the likeliest tokens.
#: None where nothing is known.
ProbsOf = Callable[[Text], Mapping[Any, float] | None]

#: A cell needs at least so many expected texts, and at least this share of all texts. With many cells a test sees little.
LEAST, LEAST_SHARE = 20.0, 1 / 200
#: The probability with which the reported shift is noticed.
_CHANCE = 0.99


@dataclass(frozen=True)
class Judgement:
    """Holds what a sample says about the distribution of texts."""

    p_value: float  # the p-value of the chi-square. If it is small, the texts have another distribution.
    num_cells: int  # the number of cells that were compared
    # The total variation over the cells between measured and expected shares. Noise alone gives about sqrt(cells / texts) /
    # 3.
    distance: float
    detectable: float  # a total variation over these cells that would be noticed with a probability of 99 % or more


def judge(texts: Iterable[Text], probs_of: ProbsOf, length: int) -> Judgement:
    """Compare sampled texts with the probabilities that they ought to follow."""
    drawn = [text[:length] for text in texts]
    least = max(LEAST, LEAST_SHARE * len(drawn))
    expected, counts = _merged(_expected(probs_of, length, drawn, least), drawn, least)
    p_value = chi_square(counts, expected) if len(counts) > 1 else 1.0
    distance = float((counts - expected).abs().sum() / 2 / len(drawn))
    return Judgement(p_value, len(counts), distance, detectable(len(counts), len(drawn)))


def finding(judgement: Judgement, num_texts: int, length: int) -> Finding:
    """A judgement as a finding. It measures the p-value, which must stay above the bound."""
    detail = (
        f"p-value must exceed the bound: {num_texts:,} texts of {length} tokens in {judgement.num_cells} cells, "
        f"total variation {judgement.distance:.3f} seen, {judgement.detectable:.3f} would be noticed (99 %)"
    )
    return Finding(judgement.p_value, SIGNIFICANCE, detail, judgement.p_value > SIGNIFICANCE and judgement.num_cells > 1)


def detectable(num_cells: int, num_texts: int) -> float:
    """The total variation that a chi-square at `SIGNIFICANCE` notices with a probability of 99 %. A shift of total
    variation t has a noncentrality of at least 4 * num_texts * t**2, whichever cells it moves between (Cauchy and Schwarz).
    So this holds for every shift, and most shifts are noticed earlier."""
    return min(1.0, float((_noncentrality(max(1, num_cells - 1)) / (4 * num_texts)) ** 0.5))


def _expected(probs_of: ProbsOf, length: int, drawn: list[Text], least: float) -> dict[Text, float]:
    """The expected number of texts by cell. A cell that ends in None holds all other tokens."""
    ended = {text for text in drawn if len(text) < length}
    cells: dict[Text, float] = {}
    open_nodes: list[tuple[Text, float]] = [((), float(len(drawn)))]
    seen = {text[:n] for text in drawn for n in range(length + 1)}
    while open_nodes:
        start, mass = open_nodes.pop()
        probs = probs_of(start) if len(start) < length else None
        if probs is None:
            cells[start] = mass
            continue
        branches = {token: mass * p for token, p in probs.items() if mass * p >= least}
        if start in ended:  # the end of a text has a token too, and the server does not name it
            branches = {token: m for token, m in branches.items() if (*start, token) in seen}
        open_nodes += [((*start, token), m) for token, m in branches.items()]
        cells[(*start, None)] = max(0.0, mass - sum(branches.values()))
    return cells


def _merged(expected: dict[Text, float], drawn: list[Text], least: float) -> tuple[Tensor, Tensor]:
    """Expected and counted texts, both [num_cells], with small cells put together. Both sum to the number of texts."""
    counts = Counter(_cell(text, expected) for text in drawn)
    large = [cell for cell, mass in expected.items() if mass >= least]
    rest = sum(mass for mass in expected.values() if mass < least)
    rest_count = len(drawn) - sum(counts[cell] for cell in large)
    masses, numbers = [expected[cell] for cell in large], [float(counts[cell]) for cell in large]
    if rest >= least or not large:
        masses, numbers = [*masses, rest], [*numbers, float(rest_count)]
    else:  # too few for a cell of their own
        smallest = min(range(len(masses)), key=masses.__getitem__)
        masses[smallest] += rest
        numbers[smallest] += rest_count
    return torch.tensor(masses, dtype=torch.float64), torch.tensor(numbers, dtype=torch.float64)


def _cell(text: Text, cells: Mapping[Text, float]) -> Text:
    """The cell of a text: the longest prefix that is a cell, or the cell of other tokens where it leaves a branching."""
    for n in range(len(text), -1, -1):
        if text[:n] in cells:
            return text[:n]
        if (*text[:n], None) in cells:
            return (*text[:n], None)
    raise AssertionError("the empty beginning is always a cell or a branching")


@cache
def _noncentrality(freedom: int) -> float:
    """The noncentrality at which a chi-square exceeds its critical value with a probability of 99 %."""
    critical = _bisect(lambda x: 1.0 - SIGNIFICANCE - _chi_square_cdf(freedom, x, 0.0), 4.0 * freedom + 200.0)
    return _bisect(lambda x: _chi_square_cdf(freedom, critical, x) - (1.0 - _CHANCE), 4.0 * freedom + 400.0)


def _chi_square_cdf(freedom: int, x: float, noncentrality: float) -> float:
    """A noncentral chi-square, as a mixture of central ones over a Poisson number of extra pairs of degrees of freedom."""
    extra = torch.arange(0, int(noncentrality + 20 * (noncentrality + 1) ** 0.5) + 20, dtype=torch.float64)
    half = torch.tensor(noncentrality / 2, dtype=torch.float64)
    weights = torch.exp(torch.xlogy(extra, half) - half - torch.lgamma(extra + 1))
    central = torch.special.gammainc(freedom / 2 + extra, torch.full_like(extra, x / 2))
    return float((weights * central).sum())


def _bisect(falling: Callable[[float], float], high: float) -> float:
    """Returns where a falling function that starts above 0 crosses 0."""
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return high
