"""Limit a run to so many minutes: it stops at a checkpoint before they are up, and the same command resumes it."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback

from rpe3d.train import sound


class OutOfTime(Exception):
    """Raised when a run stops because its minutes are up; says at which step."""

    def __init__(self, step: int, steps: int) -> None:
        super().__init__(f"out of time after step {step} of {steps}; the same command resumes there")
        self.step = step
        self.steps = steps


class Limit(TrainerCallback):  # type: ignore[misc]
    """Stops all processes at a checkpoint while there is still time to write it."""

    def __init__(self, minutes: float, begun: float) -> None:
        self.until = begun + 60 * minutes
        self.longest = 0.0
        self.saving = 6 * minutes
        """Seconds that a save takes: a tenth of the limit, until one has been timed."""
        self.since = time.monotonic()
        self.stopped = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop unless there is time for another step, as long as the longest so far, and for a save."""
        now = time.monotonic()
        self.longest, self.since = max(self.longest, now - self.since), now
        over = "over" if now + self.longest + max(self.longest, self.saving) > self.until else None
        if sound.first_of_all(over, args.device) and state.global_step < state.max_steps:
            self.stopped = control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record how long a save took, which is not part of a step."""
        now = time.monotonic()
        self.saving, self.since = now - self.since, now
