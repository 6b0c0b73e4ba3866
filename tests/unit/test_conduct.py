"""When a proposer is switched off, for how long, and when it is believed again."""

from __future__ import annotations

from outrider.engine.conduct import FIRST_PAUSE, PATIENCE, Conduct


def step(conduct: Conduct, served: tuple[int, ...] = (), failed: tuple[int, ...] = ()) -> bool:
    for request in served:
        conduct.served(request)
    for request in failed:
        conduct.failed(request)
    return conduct.end_step()


def test_only_faults_in_a_row_switch_it_off() -> None:
    conduct = Conduct()
    for _ in range(5):
        assert not any(step(conduct, (1, 2), (1, 2)) for _ in range(PATIENCE - 1))
        assert not step(conduct, (1, 2))
    assert [step(conduct, (1,), (1,)) for _ in range(PATIENCE)] == [False] * (PATIENCE - 1) + [True]
    assert (conduct.num_pauses, conduct.steps_left) == (1, FIRST_PAUSE)


def test_one_request_does_not_take_it_from_the_others() -> None:
    conduct = Conduct()
    assert not any(step(conduct, (1, 2), (1,)) for _ in range(100))
    assert conduct.num_faults == 100


def test_steps_without_it_say_nothing() -> None:
    conduct = Conduct()
    for _ in range(PATIENCE - 1):
        step(conduct, (1,), (1,))
        step(conduct)
    assert step(conduct, (), (1,)), "a fault outside of drafting counts too"


def test_pauses_double_until_a_try_succeeds() -> None:
    conduct = Conduct()
    for _ in range(PATIENCE):
        step(conduct, (1,), (1,))
    for pause in (FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE):
        assert conduct.steps_left == pause
        for _ in range(pause):
            assert not step(conduct)
        assert conduct.steps_left == 0
        assert not step(conduct), "nobody has asked it yet"
        assert step(conduct, (1,), (1,)), "one more fault is enough"
    for _ in range(8 * FIRST_PAUSE):
        step(conduct)
    assert not step(conduct, (1,))
    assert [step(conduct, (1,), (1,)) for _ in range(PATIENCE)] == [False] * (PATIENCE - 1) + [True]
    assert conduct.steps_left == FIRST_PAUSE
