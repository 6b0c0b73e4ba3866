"""When a proposer is switched off, for how long, and when it is believed again."""

from __future__ import annotations

from outrider.engine.sequence import FIRST_PAUSE, PATIENCE, ProposerBreaker


def step(breaker: ProposerBreaker, served: tuple[int, ...] = (), failed: tuple[int, ...] = ()) -> bool:
    for request in served:
        breaker.served(request)
    for request in failed:
        breaker.failed(request)
    return breaker.end_step()


def test_only_faults_in_a_row_switch_it_off() -> None:
    breaker = ProposerBreaker()
    for _ in range(5):
        assert not any(step(breaker, (1, 2), (1, 2)) for _ in range(PATIENCE - 1))
        assert not step(breaker, (1, 2))
    assert [step(breaker, (1,), (1,)) for _ in range(PATIENCE)] == [False] * (PATIENCE - 1) + [True]
    assert (breaker.num_pauses, breaker.steps_left) == (1, FIRST_PAUSE)


def test_one_request_does_not_take_it_from_the_others() -> None:
    breaker = ProposerBreaker()
    assert not any(step(breaker, (1, 2), (1,)) for _ in range(100))
    assert breaker.num_faults == 100


def test_steps_without_it_say_nothing() -> None:
    breaker = ProposerBreaker()
    for _ in range(PATIENCE - 1):
        step(breaker, (1,), (1,))
        step(breaker)
    assert step(breaker, (), (1,)), "a fault outside of drafting counts too"


def test_pauses_double_until_a_try_succeeds() -> None:
    breaker = ProposerBreaker()
    for _ in range(PATIENCE):
        step(breaker, (1,), (1,))
    for pause in (FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE):
        assert breaker.steps_left == pause
        for _ in range(pause):
            assert not step(breaker)
        assert breaker.steps_left == 0
        assert not step(breaker), "nobody has asked it yet"
        assert step(breaker, (1,), (1,)), "one more fault is enough"
    for _ in range(8 * FIRST_PAUSE):
        step(breaker)
    assert not step(breaker, (1,))
    assert [step(breaker, (1,), (1,)) for _ in range(PATIENCE)] == [False] * (PATIENCE - 1) + [True]
    assert breaker.steps_left == FIRST_PAUSE
