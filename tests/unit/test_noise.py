"""Keyed noise: stable values, independent streams, exact laws, and no key used twice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, chi2_contingency
from torch import Tensor

from outrider.draft import Law
from outrider.errors import NoiseReuseError
from outrider.propose.base import DraftNoise, Drawn, ProposeRequest
from outrider.verify import noise
from outrider.verify.noise import Key, KeyedNoise, Stream, gumbel_max, invert_cdf, key_bits, mix_fields, uniform
from tests.unit.builders import make_sequence

pytestmark = pytest.mark.usefixtures("kernels")

SURE = 1e-6  # chance that a chi-square test of the right law fails; seeds are fixed, so it fails always or never
EXTREMES = torch.tensor([0, -1, 2**63 - 1, -(2**63), 1, 2**12 - 1, 2**12, -(2**12), 2**62])
MASK = 2**64 - 1


def splitmix(x: int) -> int:
    """SplitMix64's finaliser on Python integers (Steele et al. 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def many_bits(n: int, stream: Stream = Stream.TARGET, *, seed: int = 5, round: int = 0, drafter: int = 0) -> Tensor:
    """Bits of n consecutive positions."""
    fields = np.zeros((n, 5), np.uint64)
    fields[:, 0], fields[:, 2], fields[:, 3], fields[:, 4] = seed, int(stream) + (drafter << 8), np.arange(n), round
    return torch.from_numpy(mix_fields(fields))


def chi_square(observed: Sequence[float], expected: Sequence[float]) -> float:
    """Chance of a deviation as large under the expected law."""
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    return float(chi2.sf(statistic, len(expected) - 1))


# -- stable across releases --------------------------------------------------------------------------------------------

GOLDEN = [
    (Key(0, 0, 0, Stream.TARGET, 0), 8695987549771912286),
    (Key(9, 1, 0, Stream.TARGET, 0), 3786468572763441381),
    (Key(0, 0, 1, Stream.TARGET, 0), -1039657597017818155),
    (Key(0, 0, 0, Stream.DRAFT, 0), -577810016601568894),
    (Key(0, 0, 0, Stream.ACCEPT, 0), -4355073624772699794),
    (Key(0, 0, 0, Stream.RECOVER, 0), 6209068469692338416),
    (Key(0, 0, 0, Stream.TARGET, 1), 3100193165012466057),
    (Key(0, 0, 0, Stream.DRAFT, 0, 1), -3301820522596749961),
    (Key(0, 2**63 - 1, 3, Stream.ACCEPT, 4095, 17), -4111356903736392204),
    (Key(0, 7, 0, Stream.TARGET, 12), 4480434035232240136),
    # These two come from the code before keys had a drafter: who drafts first draws what was always drawn.
    (Key(0, 2**62 + 5, 2, Stream.DRAFT, 777, 9, 3), -206997482947630834),
    (Key(0, 11, 0, Stream.RECOVER, 31, 0, 0), 5314368114318529332),
    (Key(0, 2**62 + 5, 2, Stream.DRAFT, 777, 9, 3, drafter=1), 2380270821521216402),
]
DRAWS = {
    Stream.TARGET: [1, 3, 3, 2, 1, 3, 2, 0, 3, 2, 3, 2, 2, 1, 3, 3, 0, 1, 1, 3, 0, 2, 3, 2],
    Stream.DRAFT: [3, 2, 3, 1, 3, 3, 3, 0, 2, 2, 3, 3, 2, 2, 1, 2, 3, 2, 3, 1, 0, 1, 0, 2],
    Stream.ACCEPT: [1, 2, 1, 2, 0, 1, 3, 3, 2, 2, 2, 1, 0, 2, 2, 3, 3, 3, 2, 1, 3, 1, 2, 1],
    Stream.RECOVER: [3, 2, 2, 0, 3, 2, 3, 1, 3, 1, 3, 3, 0, 2, 1, 0, 2, 3, 1, 3, 3, 0, 3, 3],
    Stream.GUESS: [1, 3, 3, 2, 1, 3, 2, 0, 3, 2, 3, 2, 2, 1, 3, 3, 0, 1, 1, 3, 0, 2, 3, 2],
}
COINS = [1, 0, 1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 1, 0, 1, 1, 1]


def test_a_seed_gives_the_same_bits_in_every_release() -> None:
    assert key_bits([key for key, _ in GOLDEN]).tolist() == [bits for _, bits in GOLDEN]


def test_many_keys_have_the_bits_of_each_of_them() -> None:
    keys = [BASE._replace(position=place, drafter=1 << 70, branch=1 << 40) for place in range(50)]
    assert key_bits(keys).tolist() == [int(key_bits([key])[0]) for key in keys]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("stream", list(Stream))
def test_a_seed_gives_the_same_tokens_in_every_release(stream: Stream, dtype: torch.dtype) -> None:
    law = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=dtype)
    keys = [Key(0, 42, 0, stream, position) for position in range(24)]
    assert KeyedNoise().categorical(law.expand(24, 4), keys).tolist() == DRAWS[stream]


def test_a_seed_gives_the_same_coins_in_every_release() -> None:
    keys = [Key(0, 42, 0, Stream.ACCEPT, position) for position in range(24)]
    assert KeyedNoise().bernoulli(torch.full((24,), 0.5), keys).int().tolist() == COINS


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**63 - 1),
    st.integers(0, 1000),
    st.sampled_from(list(Stream)),
    st.integers(0, 2**31),
    st.integers(0, 2**31),
    st.integers(0, 511),
    st.integers(0, 2**40),
)
def test_bits_are_splitmix_over_the_fields(
    seed: int, sample: int, stream: Stream, position: int, round: int, branch: int, drafter: int
) -> None:
    state = 0
    fields = (seed, sample, stream + (drafter << 8), position, round + (branch << 32))
    for value in (seed, sample, Stream.TARGET, position, 0) if stream is Stream.GUESS else fields:
        state = splitmix((state + value + 0x9E3779B97F4A7C15) & MASK)
    key = Key(3, seed, sample, stream, position, round, branch, drafter)
    assert int(key_bits([key])[0]) & MASK == state
    if stream is not Stream.GUESS:
        assert int(mix_fields(np.array([fields], np.uint64))[0]) & MASK == state, "many at once get the same"


def test_token_noise_is_the_same_mix_on_tensors() -> None:
    values = [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF]
    mixed = noise._mix_torch(torch.tensor(values)).tolist()
    assert [v & MASK for v in mixed] == [splitmix(v & MASK) for v in values]


def test_values_depend_on_the_key_alone() -> None:
    law = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).double().expand(30, 4)
    keys = [Key(7, 3, 0, Stream(i % 5), 10 + i, i) for i in range(30)]
    together = KeyedNoise().categorical(law, keys).tolist()
    apart, backwards = KeyedNoise(), KeyedNoise()
    assert [int(apart.categorical(law[:1], [key])) for key in keys] == together
    assert backwards.categorical(law, keys[::-1]).tolist() == together[::-1]


# -- fields of a key ---------------------------------------------------------------------------------------------------

BASE = Key(1, 42, 0, Stream.DRAFT, 10, 2)


@pytest.mark.parametrize("field", ["seed", "sample", "position", "round", "branch", "drafter"])
def test_every_field_but_the_owner_changes_the_bits(field: str) -> None:
    other = BASE._replace(**{field: getattr(BASE, field) + 1})
    assert key_bits([BASE])[0] != key_bits([other])[0]


def test_the_owner_is_no_part_of_the_noise() -> None:
    assert key_bits([BASE])[0] == key_bits([BASE._replace(owner=99)])[0]


def test_all_streams_differ_but_guess() -> None:
    bits = [int(key_bits([BASE._replace(stream=stream, round=0)])[0]) for stream in Stream if stream is not Stream.GUESS]
    assert len(set(bits)) == 4


def test_fields_are_not_interchangeable() -> None:
    keys = [Key(0, a, b, Stream.DRAFT, c, d) for a, b, c, d in [(1, 2, 3, 4), (2, 1, 3, 4), (4, 3, 2, 1), (1, 2, 4, 3)]]
    assert len(set(key_bits(keys).tolist())) == 4


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**63 - 1),
    st.integers(0, 9),
    st.integers(0, 5000),
    st.integers(0, 500),
    st.integers(0, 63),
    st.integers(0, 2**40),
)
def test_a_guess_reads_the_targets_noise_whatever_the_round_the_branch_and_the_drafter(
    seed: int, sample: int, position: int, round: int, branch: int, drafter: int
) -> None:
    law = torch.rand(1, 50, generator=torch.Generator().manual_seed(position)).double()
    guess = Key(0, seed, sample, Stream.GUESS, position, round, branch, drafter)
    target = Key(0, seed, sample, Stream.TARGET, position)
    source = KeyedNoise()
    assert key_bits([guess])[0] == key_bits([target])[0]
    assert int(source.categorical(law, [guess])) == int(source.categorical(law, [target]))


def test_a_guess_agrees_with_the_target_as_often_as_the_coupling_promises() -> None:
    target, draft = torch.tensor([0.5, 0.2, 0.2, 0.1]).double(), torch.tensor([0.3, 0.4, 0.2, 0.1]).double()
    bits, n = many_bits(40_000), 40_000
    agreed = float((gumbel_max(target.expand(n, 4), bits) == gumbel_max(draft.expand(n, 4), bits)).double().mean())
    # An exponential race agrees on token x with chance 1 / sum_y max(p_y / p_x, q_y / q_x).
    p, q = target.tolist(), draft.tolist()
    expected = sum(1 / sum(max(p[y] / p[x], q[y] / q[x]) for y in range(4)) for x in range(4))
    assert abs(agreed - expected) < 5 * math.sqrt(expected * (1 - expected) / n)
    distance = float((target - draft).clamp(min=0).sum())
    assert agreed > (1 - distance) / (1 + distance) - 0.01


# -- independence ------------------------------------------------------------------------------------------------------


def _independent(first: Tensor, second: Tensor, cells: int = 12) -> bool:
    table = np.zeros((cells, cells))
    np.add.at(table, ((uniform(first) * cells).long().numpy(), (uniform(second) * cells).long().numpy()), 1)
    return bool(chi2_contingency(table).pvalue > SURE)


@pytest.mark.parametrize(("one", "other"), list(combinations([s for s in Stream if s is not Stream.GUESS], 2)))
def test_streams_are_independent(one: Stream, other: Stream) -> None:
    assert _independent(many_bits(60_000, one), many_bits(60_000, other))


@pytest.mark.parametrize("lag", [1, 2, 7])
def test_neighbouring_positions_seeds_and_rounds_are_independent(lag: int) -> None:
    bits = many_bits(60_000 + lag)
    assert _independent(bits[:-lag], bits[lag:])
    assert _independent(many_bits(60_000, seed=5), many_bits(60_000, seed=5 + lag))
    assert _independent(many_bits(60_000, Stream.DRAFT), many_bits(60_000, Stream.DRAFT, round=lag))
    for stream in (Stream.DRAFT, Stream.ACCEPT, Stream.RECOVER):
        assert _independent(many_bits(60_000, stream), many_bits(60_000, stream, drafter=lag))


# -- who draws ---------------------------------------------------------------------------------------------------------

NESTED = DraftNoise(KeyedNoise())
VIEW = make_sequence(4, seed=42).view
NUMBERS: dict[str, tuple[DraftNoise, int]] = {
    "the first proposer": (NESTED, 0),
    "the second": (NESTED, 1),
    "a member of the first": (NESTED.member(0), 0),
    "its neighbour": (NESTED.member(1), 0),
    "a member of the second": (NESTED.member(0), 1),
    "a member of a member": (NESTED.member(0).member(0), 0),
    "its aunt's": (NESTED.member(1).member(0), 0),
}


def asked(drafter: int = 0, **how: Any) -> ProposeRequest:
    """A request for a new sequence of four tokens."""
    return ProposeRequest(make_sequence(4, seed=42).view, 5, drafter=drafter, **how)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.data())
def test_no_two_drafters_have_one_number(data: st.DataObject) -> None:
    """Of a sequence's proposers, the members of nested ones, their members, and so on."""
    whose = st.tuples(st.integers(0, 40), st.lists(st.integers(0, 14), max_size=4))
    one, other = data.draw(whose), data.draw(whose)
    numbers = []
    for index, members in (one, other):
        noise = DraftNoise(KeyedNoise())
        for member in members:
            noise = noise.member(member)
        numbers.append(noise.drafter(ProposeRequest(VIEW, 5, drafter=index)))
    assert (numbers[0] == numbers[1]) == (one == other)
    assert all(0 <= number < 2**55 for number in numbers), "there is room for it in a key's bits"


def test_no_two_drafters_of_few_levels_have_one_number() -> None:
    """The same, with every drafter of up to three levels at once."""
    seen: dict[int, tuple[int, ...]] = {}
    for index in range(40):
        for members in [(), *((a,) for a in range(15)), *((a, b) for a in range(15) for b in range(15))]:
            number = DraftNoise(KeyedNoise(), members).drafter(ProposeRequest(VIEW, 5, drafter=index))
            assert seen.setdefault(number, (index, *members)) == (index, *members)


@pytest.mark.parametrize(("one", "other"), list(combinations(NUMBERS, 2)))
def test_drafters_draw_independently(one: str, other: str) -> None:
    bits = [
        many_bits(60_000, Stream.DRAFT, drafter=noise.drafter(asked(index)))
        for noise, index in (NUMBERS[one], NUMBERS[other])
    ]
    assert not bool((bits[0] == bits[1]).any())
    assert _independent(bits[0], bits[1])


def test_a_proposers_draw_is_named_by_all_that_it_is() -> None:
    class Recorded:
        def __init__(self) -> None:
            self.keys: list[Key] = []

        def categorical(self, probs: Tensor, keys: Sequence[Key]) -> Tensor:
            self.keys += keys
            return torch.zeros(len(keys), dtype=torch.int64)

    source: Any = Recorded()
    request = asked(2, path=(7, 8))
    request.sequence.round = 6
    guessing = dataclasses.replace(request, coupled=True, drawn=Drawn())
    noise = DraftNoise(source)
    noise.categorical(torch.full((3, 4), 0.25), [request, request, guessing], [(), (0,), ()])
    noise.categorical(torch.full((1, 4), 0.25), [request], [(0,)])
    noise.member(4).categorical(torch.full((1, 4), 0.25), [request], [(0, 0)])
    whose = (request.sequence.seq_id, 42, 0)
    assert source.keys == [
        Key(*whose, Stream.DRAFT, 6, 6, 0, 2),
        Key(*whose, Stream.DRAFT, 7, 6, 0, 2),
        Key(*whose, Stream.GUESS, 6, 6, 0, 2),
        Key(*whose, Stream.DRAFT, 7, 6, 1, 2),
        Key(*whose, Stream.DRAFT, 8, 6, 0, noise.member(4).drafter(request)),
    ]
    assert noise.law(request) is Law.SAMPLED
    assert noise.law(guessing) is noise.member(1).law(guessing) is Law.COUPLED


def test_the_first_proposer_draws_what_was_always_drawn() -> None:
    law = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    request = asked()
    assert DraftNoise(KeyedNoise()).chain(law.expand(20, 4), request) == DRAWS[Stream.DRAFT][4:]
    guesses = DraftNoise(KeyedNoise()).member(3)
    coupled = dataclasses.replace(asked(5), coupled=True)
    assert guesses.chain(law.expand(20, 4), coupled) == DRAWS[Stream.TARGET][4:]


def test_two_drafters_may_draw_at_one_place_and_one_drafter_only_once() -> None:
    noise, first, second = DraftNoise(KeyedNoise()), asked(0), asked(1)
    second = dataclasses.replace(second, sequence=first.sequence)
    law = torch.full((1, 4), 0.25)
    for draws, request in ((noise, first), (noise, second), (noise.member(0), first), (noise.member(1), first)):
        draws.categorical(law, [dataclasses.replace(request, drawn=Drawn())], [()])
        with pytest.raises(NoiseReuseError):
            draws.categorical(law, [dataclasses.replace(request, drawn=Drawn())], [()])


def test_a_nested_proposer_has_no_more_members_than_there_are_numbers() -> None:
    NESTED.member(14)
    for index in (-1, 15):
        with pytest.raises(AssertionError, match="members"):
            NESTED.member(index)


def test_the_independence_check_sees_dependence() -> None:
    bits = many_bits(60_000)
    assert not _independent(bits, bits)
    mixed = torch.where(torch.arange(60_000) % 20 == 0, bits, many_bits(60_000, Stream.DRAFT))
    assert not _independent(bits, mixed)


def test_token_noise_of_neighbouring_tokens_is_independent() -> None:
    laws = torch.tensor([0.5, 0.5, 0.0, 0.0]).double(), torch.tensor([0.0, 0.0, 0.5, 0.5]).double()
    bits = many_bits(60_000)
    one, other = (gumbel_max(law.expand(60_000, 4), bits) for law in laws)
    table = np.zeros((2, 2))
    np.add.at(table, (one.numpy(), other.numpy() - 2), 1)
    assert chi2_contingency(table).pvalue > SURE


# -- uniforms ----------------------------------------------------------------------------------------------------------


def test_uniforms_lie_strictly_inside_the_unit_interval_at_the_extremes() -> None:
    values = uniform(EXTREMES)
    assert values.dtype == torch.float64
    assert bool(((values > 0.0) & (values < 1.0)).all())
    assert float(uniform(torch.tensor([0]))) == 2.0**-53
    assert float(uniform(torch.tensor([-1]))) == 1.0 - 2.0**-53


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(-(2**63), 2**63 - 1))
def test_uniforms_are_the_upper_bits_in_order(bits: int) -> None:
    value = float(uniform(torch.tensor([bits])))
    assert value == (((bits & MASK) >> 12) + 0.5) / 2**52
    assert 0.0 < value < 1.0


def test_uniforms_are_uniform() -> None:
    counts = np.bincount((uniform(many_bits(200_000)) * 64).long().numpy(), minlength=64)
    assert chi_square(counts, [200_000 / 64] * 64) > SURE


# -- laws --------------------------------------------------------------------------------------------------------------

LAWS = [
    [0.1, 0.2, 0.3, 0.4],
    [0.0, 0.5, 0.0, 0.5, 0.0],
    [0.97, 0.01, 0.01, 0.01],
    [1.0],
    [0.0, 0.0, 1.0],
    [1 / 37] * 37,
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("method", [gumbel_max, invert_cdf])
@pytest.mark.parametrize("law", LAWS, ids=lambda law: f"{len(law)} tokens")
def test_tokens_have_the_law_they_are_drawn_from(
    method: Callable[[Tensor, Tensor], Tensor], law: list[float], dtype: torch.dtype
) -> None:
    n = 100_000
    tokens = method(torch.tensor(law, dtype=dtype).expand(n, len(law)), many_bits(n, seed=11))
    counts = torch.bincount(tokens, minlength=len(law)).tolist()
    assert all(count == 0 for count, p in zip(counts, law, strict=True) if p == 0.0)
    possible = [i for i, p in enumerate(law) if p > 0.0]
    if len(possible) == 1:
        assert counts[possible[0]] == n
    else:
        assert chi_square([counts[i] for i in possible], [law[i] * n for i in possible]) > SURE


def test_the_law_check_sees_a_biased_law() -> None:
    counts = torch.bincount(invert_cdf(torch.tensor([0.5, 0.5]).expand(100_000, 2), many_bits(100_000)), minlength=2)
    assert chi_square(counts.tolist(), [51_500, 48_500]) < SURE


@pytest.mark.parametrize("method", [gumbel_max, invert_cdf])
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_token_of_probability_zero_is_never_drawn(
    method: Callable[[Tensor, Tensor], Tensor], data: st.DataObject
) -> None:
    weight = st.just(0.0) | st.floats(1e-300, 1.0) | st.sampled_from([5e-324, 1e-45, 1e-38, 1e-12])
    weights = data.draw(st.lists(weight, min_size=1, max_size=12))
    law = torch.tensor(weights, dtype=data.draw(st.sampled_from([torch.float64, torch.float32])))
    if not bool((law > 0).any()):
        return
    drawn = data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
    bits = torch.cat([EXTREMES, torch.tensor(drawn, dtype=torch.int64)])
    if method is gumbel_max and float(law.max()) < 1e-300:
        return  # a law whose every probability underflows when divided; not one a softmax writes
    tokens = method(law.expand(len(bits), -1), bits)
    assert bool((law[tokens] > 0).all())


def test_laws_need_not_sum_to_one() -> None:
    law, n = torch.tensor([1.0, 3.0]).double(), 100_000
    for method in (gumbel_max, invert_cdf):
        ones = int(method(law.expand(n, 2) * 1e-3, many_bits(n)).sum())
        assert chi_square([n - ones, ones], [n / 4, 3 * n / 4]) > SURE


@pytest.mark.parametrize("probability", [0.0, 0.125, 0.5, 0.9, 1.0])
def test_coins_fall_with_their_probability(probability: float) -> None:
    n = 20_000
    keys = [Key(0, 3, 0, Stream.ACCEPT, position) for position in range(n)]
    fallen = int(KeyedNoise().bernoulli(torch.full((n,), probability), keys).sum())
    if probability in (0.0, 1.0):
        assert fallen == n * probability
    else:
        assert chi_square([fallen, n - fallen], [n * probability, n * (1 - probability)]) > SURE


def test_certain_coins_are_certain_at_extreme_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "key_bits", lambda keys: EXTREMES.numpy())
    keys = [Key(0, 0, 0, Stream.ACCEPT, position) for position in range(len(EXTREMES))]
    assert not KeyedNoise().bernoulli(torch.zeros(len(keys)), keys).any()
    assert KeyedNoise().bernoulli(torch.ones(len(keys)), keys).all()


# -- no key twice ------------------------------------------------------------------------------------------------------

LAW = torch.tensor([[0.5, 0.5]])


def test_a_key_used_twice_raises() -> None:
    source = KeyedNoise()
    source.categorical(LAW, [BASE])
    with pytest.raises(NoiseReuseError):
        source.categorical(LAW, [BASE])


def test_a_key_used_for_a_token_is_spent_for_coins_too() -> None:
    source = KeyedNoise()
    source.categorical(LAW, [BASE])
    with pytest.raises(NoiseReuseError):
        source.bernoulli(torch.tensor([0.5]), [BASE])


def test_a_key_twice_in_one_call_raises() -> None:
    with pytest.raises(NoiseReuseError):
        KeyedNoise().bernoulli(torch.tensor([0.5, 0.5]), [BASE, BASE])


def test_keys_of_two_owners_are_apart_in_the_ledger() -> None:
    source = KeyedNoise()
    first = source.categorical(LAW, [BASE])
    assert torch.equal(source.categorical(LAW, [BASE._replace(owner=2)]), first)


def test_a_guess_does_not_spend_the_targets_key() -> None:
    source = KeyedNoise()
    source.categorical(LAW, [BASE._replace(stream=Stream.GUESS, round=0)])
    source.categorical(LAW, [BASE._replace(stream=Stream.TARGET, round=0)])


def test_forgetting_an_owner_frees_its_keys_and_no_others() -> None:
    source = KeyedNoise()
    source.categorical(LAW.expand(2, 2), [BASE, BASE._replace(owner=2)])
    source.forget(1)
    source.categorical(LAW, [BASE])
    with pytest.raises(NoiseReuseError):
        source.categorical(LAW, [BASE._replace(owner=2)])
    source.forget(12345)  # unknown owners are no error


def test_no_keys_no_draws() -> None:
    source = KeyedNoise()
    assert source.categorical(torch.empty(0, 4), []).shape == (0,)
    assert source.bernoulli(torch.empty(0), []).shape == (0,)
