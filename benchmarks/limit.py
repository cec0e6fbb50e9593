"""The minutes of a command that is cut off when they are over."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from rpe3d.config import ConfigError

OUT_OF_TIME = 3
"""Exit status of a command whose minutes were over: the same command resumes."""


class TimeUpError(Exception):
    """The minutes are over, or would be before the next piece of work is done."""


class Clock:
    """Counts from the start of a command; without a limit there is always time."""

    def __init__(self, minutes: float | None) -> None:
        self.until = float("inf") if minutes is None else time.monotonic() + 60 * minutes
        self.stopped = False

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

    @contextmanager
    def limited(self) -> Iterator[None]:
        """End the work of a `with` where the minutes are over."""
        try:
            yield
        except TimeUpError:
            self.stopped = True

    def status(self) -> int:
        """Return the exit status of the command; say that it has to be given again where its minutes were over."""
        if not self.stopped:
            return 0
        print("the time is up; the same command resumes", flush=True)
        return OUT_OF_TIME


def command(main: Callable[[], int]) -> NoReturn:
    """Run a command and exit with its status; a refusal is said in two lines."""
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(f"error: {error.problem}\nhint: {error.hint}")
