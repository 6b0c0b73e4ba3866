"""Circuit breaker for proposers: one that brings nothing but faults is switched off for a while. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

#: Steps in a row in which a proposer brought nothing but faults, after which it is switched off.
PATIENCE = 8
#: Steps for which it is switched off at first. Each time that its next try fails too, they double.
FIRST_PAUSE = 256


@dataclass
class ProposerBreaker:
    """Counts the faults of one proposer over all its sequences, and switches it off for a number of steps.

    A step counts against it only where every request that it worked for met a fault, so that a single request that makes it
    stumble does not take it from all others.

    Attributes:
        num_faults: Requests that met a fault, step by step.
        num_pauses: How often it was switched off.
    """

    num_faults: int = 0
    num_pauses: int = 0
    _served: set[int] = field(default_factory=set)
    _failed: set[int] = field(default_factory=set)
    _num_bad_steps: int = 0
    _on_trial: bool = False
    _next_pause: int = FIRST_PAUSE
    _steps_left: int = 0

    @property
    def steps_left(self) -> int:
        """For how many steps more it is switched off."""
        return self._steps_left

    def served(self, request_id: int) -> None:
        """It was asked for a draft in this step."""
        self._served.add(request_id)

    def failed(self, request_id: int) -> None:
        """It brought a request nothing but a fault."""
        self._failed.add(request_id)

    def end_step(self) -> bool:
        """The step is over; returns whether it is switched off from now on."""
        if self._steps_left:
            self._steps_left -= 1
            self._on_trial = not self._steps_left
            return False
        sound, failed = self._served - self._failed, self._failed
        self.num_faults += len(failed)
        self._served, self._failed = set(), set()
        if sound:
            self._num_bad_steps, self._on_trial, self._next_pause = 0, False, FIRST_PAUSE
        elif failed:
            self._num_bad_steps += 1
        if not failed or (self._num_bad_steps < PATIENCE and not (self._on_trial and not sound)):
            return False
        self._steps_left, self._next_pause = self._next_pause, 2 * self._next_pause
        self._num_bad_steps, self._on_trial = 0, False
        self.num_pauses += 1
        return True
