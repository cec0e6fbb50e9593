"""Make Ctrl-C wait for a running import to finish.

Inside an import KeyboardInterrupt does not arrive as such: transformers turns it into a ModuleNotFoundError, numpy into
endless recursion, and C++ modules abort. An import takes seconds; a second Ctrl-C does not wait.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN = 0.05  # seconds until a signal that came during an import is sent again


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


class _Handler:
    """A handler of SIGINT that raises KeyboardInterrupt as soon as nothing is being imported."""

    def __init__(self) -> None:
        self.pressed = 0
        self.resent = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.pressed += not self.resent
        self.resent = False
        if self.pressed > 1 or not _importing(frame):
            raise KeyboardInterrupt
        timer = threading.Timer(AGAIN, self._send)
        timer.daemon = True
        timer.start()

    def _send(self) -> None:
        self.resent = True
        os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def patient_interrupts() -> Iterator[None]:
    """Make Ctrl-C wait for imports inside a `with` block, unless SIGINT is already handled or ignored."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _Handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
