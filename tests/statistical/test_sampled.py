"""Production random numbers: a chi-square over a million texts, and correlated noise that it must see."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.lab.prove.sampled import production_bits, sample_p_value
from outrider.verify.noise import Key, Stream, key_bits, uniform

SIGNIFICANCE = 1e-6


@pytest.mark.parametrize("rule", ["token", "block", "walk", "coupled"])
def test_joint_distribution_of_three_tokens(rule):
    assert sample_p_value(rule, 1_000_000) > SIGNIFICANCE


@pytest.mark.parametrize(("rule", "victim"), [("token", Stream.ACCEPT), ("block", Stream.RECOVER)])
def test_control_draft_noise_used_again_shows(rule, victim):
    def reused(seeds, stream, position):
        return production_bits(seeds, Stream.DRAFT if stream is victim else stream, position)

    assert sample_p_value(rule, 400_000, reused) < SIGNIFICANCE


def test_control_positions_that_share_noise_show():
    assert sample_p_value("walk", 400_000, lambda seeds, stream, _: production_bits(seeds, stream, 0)) < SIGNIFICANCE


def test_bulk_bits_are_those_of_the_keys():
    seeds = np.arange(100, dtype=np.uint64)
    for stream in (Stream.TARGET, Stream.DRAFT, Stream.ACCEPT, Stream.RECOVER):
        keys = [Key(0, int(seed), 0, stream, 3) for seed in seeds]
        assert production_bits(seeds, stream, 3).tolist() == key_bits(keys).tolist()


@pytest.mark.parametrize("other", [(Stream.ACCEPT, 0), (Stream.DRAFT, 1), (Stream.RECOVER, 0), (Stream.TARGET, 0)])
def test_streams_and_positions_are_independent_and_uniform(other):
    seeds = np.arange(400_000, dtype=np.uint64)
    a, b = uniform(production_bits(seeds, Stream.DRAFT, 0)), uniform(production_bits(seeds, *other))
    counts = torch.bincount((a * 8).long() * 8 + (b * 8).long(), minlength=64).double()
    expected = len(seeds) / 64
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert float(torch.special.gammaincc(torch.tensor(31.5, dtype=torch.float64), statistic / 2)) > SIGNIFICANCE
