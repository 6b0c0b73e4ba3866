"""The forking noise itself: it takes every branch, weighs it right, and refuses what the production source refuses."""

from __future__ import annotations

import pytest
import torch

from outrider.errors import NoiseReuseError
from outrider.lab.prove.forking import Distribution, ForkingNoise, explore, total_variation
from outrider.lab.prove.reference import WHOLE, area, cell
from outrider.verify.noise import Key, KeyedNoise, Stream


def _key(stream: Stream, position: int = 0, round: int = 0) -> Key:
    return Key(0, 7, 0, stream, position, round)


def _distribution(program) -> Distribution:
    noise = ForkingNoise()
    return explore(lambda _: [program(noise)], noise)


def test_two_decisions_make_a_product_distribution():
    def program(noise):
        coin = noise.bernoulli(torch.tensor([0.25]), [_key(Stream.ACCEPT)])
        token = noise.categorical(torch.tensor([[0.5, 0.0, 0.25, 0.25]]), [_key(Stream.RECOVER)])
        return bool(coin), int(token)

    found = _distribution(program)
    exact = {(c, t): a * b for c, a in ((True, 0.25), (False, 0.75)) for t, b in ((0, 0.5), (2, 0.25), (3, 0.25))}
    assert total_variation(found.probs, exact) < 1e-15
    assert found.num_paths == 6


@pytest.mark.parametrize(("chance", "falls"), [(0.0, False), (1.0, True)])
def test_sure_coins_do_not_fork(chance, falls):
    found = _distribution(lambda noise: (bool(noise.bernoulli(torch.tensor([chance]), [_key(Stream.ACCEPT)])),))
    assert found.probs == {(falls,): 1.0}


@pytest.mark.parametrize("make", [ForkingNoise, KeyedNoise])
def test_a_key_used_twice_raises(make):
    noise = make()
    if isinstance(noise, ForkingNoise):
        noise.begin()
        noise.start(1)
    noise.bernoulli(torch.tensor([0.5]), [_key(Stream.ACCEPT)])
    with pytest.raises(NoiseReuseError):
        noise.bernoulli(torch.tensor([0.5]), [_key(Stream.ACCEPT)])


def test_two_owners_on_one_noise_raise():
    noise = ForkingNoise()
    noise.begin()
    noise.start(1)
    noise.categorical(torch.tensor([[0.5, 0.5]]), [_key(Stream.DRAFT)])
    with pytest.raises(NoiseReuseError):
        noise.categorical(torch.tensor([[0.5, 0.5]]), [_key(Stream.DRAFT)._replace(owner=1)])


def test_a_guess_under_the_same_probabilities_is_always_right():
    row = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64)

    def program(noise):
        return tuple(int(noise.categorical(row, [_key(s)])) for s in (Stream.GUESS, Stream.TARGET))

    found = _distribution(program)
    assert total_variation(found.probs, {(0, 0): 0.2, (1, 1): 0.5, (2, 2): 0.3}) < 1e-14


def test_shared_noise_agrees_with_the_production_race():
    q, p = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64), torch.tensor([0.6, 0.1, 0.3], dtype=torch.float64)

    def program(noise):
        guess = int(noise.categorical(q[None], [_key(Stream.GUESS)]))
        return guess, int(noise.categorical(p[None], [_key(Stream.TARGET)]))

    count = 40_000
    noise = KeyedNoise()
    guesses = noise.categorical(q.expand(count, 3), [_key(Stream.GUESS, i) for i in range(count)]).tolist()
    tokens = noise.categorical(p.expand(count, 3), [_key(Stream.TARGET, i) for i in range(count)]).tolist()
    pairs = list(zip(guesses, tokens, strict=True))
    measured = {pair: pairs.count(pair) / count for pair in set(pairs)}
    assert total_variation(_distribution(program).probs, measured) < 0.01
    independent = {(g, t): float(q[g] * p[t]) for g in range(3) for t in range(3)}
    assert total_variation(_distribution(program).probs, independent) > 0.1  # the control: sharing is seen


def test_cells_partition_the_simplex():
    probs = (0.2, 0.0, 0.8)
    assert [float(area(cell(WHOLE, probs, t))) for t in (0, 2)] == pytest.approx([0.2, 0.8], abs=1e-15)


def test_guesses_over_larger_vocabularies_are_refused():
    noise = ForkingNoise()
    noise.begin()
    noise.start(1)
    with pytest.raises(AssertionError, match="vocabulary of 3"):
        noise.categorical(torch.full((1, 4), 0.25), [_key(Stream.GUESS)])


def test_a_program_that_is_not_deterministic_is_refused():
    runs = iter(range(100))

    def program(noise):
        noise.bernoulli(torch.tensor([0.5]), [_key(Stream.ACCEPT, position=next(runs))])
        return ()

    with pytest.raises(AssertionError, match="deterministic"):
        _distribution(program)
