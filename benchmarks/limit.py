"""The minutes of a command that is cut off when they are over."""

from __future__ import annotations

import time

OUT_OF_TIME = 3
"""Exit status of a command whose minutes were over: the same command resumes."""


class TimeUpError(Exception):
    """The minutes are over, or would be before the next piece of work is done."""


class Clock:
    """Counts from the start of a command; without a limit there is always time."""

    def __init__(self, minutes: float | None) -> None:
        self.until = float("inf") if minutes is None else time.monotonic() + 60 * minutes

    @property
    def left(self) -> float | None:
        """Minutes that are left; None without a limit."""
        return None if self.until == float("inf") else (self.until - time.monotonic()) / 60

    def over(self, seconds: float = 0.0) -> bool:
        """Say whether less than so much time is left."""
        return time.monotonic() + seconds > self.until

    def check(self, seconds: float = 0.0) -> None:
        """Raise if less than so much time is left."""
        if self.over(seconds):
            raise TimeUpError
