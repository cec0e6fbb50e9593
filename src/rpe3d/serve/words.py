"""Pass on vLLM's output as it comes, and find the error in it that says why an engine did not start."""

from __future__ import annotations

import os
import re
import select
from contextlib import suppress
from threading import Thread

ERROR = re.compile(r"(?:^|\] )((?:\w+\.)*\w*(?:Error|Exception): .+)", re.M)
ELSEWHERE = "See root cause above"
"""Part of the last error that vLLM prints: the cause is an earlier one."""
LONGEST = 220
"""Maximum characters of an error that are repeated."""


def cause(said: str) -> str:
    """Return the last error in vLLM's output that is itself a cause, cut to whole sentences; empty without one."""
    found: list[str] = [text for text in ERROR.findall(said) if ELSEWHERE not in text]
    if not found or len(found[-1]) <= LONGEST:
        return found[-1].strip() if found else ""
    return found[-1][:LONGEST].rpartition(". ")[0] or found[-1][:LONGEST]


class Words:
    """Passes on what is written to a pipe, byte for byte, and keeps it until `forget`."""

    def __init__(self, pipe: int, out: int) -> None:
        self.kept: bytearray | None = bytearray()
        self.thread = Thread(target=self._pass_on, args=(pipe, out), daemon=True)
        self.thread.start()

    def _pass_on(self, pipe: int, out: int) -> None:
        while piece := os.read(pipe, 1 << 16):
            kept = self.kept
            if kept is not None:
                kept += piece
            with suppress(OSError):  # a terminal that is gone: who writes must still be read, or it would wait
                while piece:
                    select.select([], [out], [])  # where writing does not wait by itself
                    with suppress(BlockingIOError):
                        piece = piece[os.write(out, piece) :]
        os.close(pipe)

    def forget(self) -> None:
        """Keep nothing from here on: later output of a server does not explain why it did not start."""
        self.kept = None

    def cause(self) -> str:
        """Return why a process that has ended did not start, as far as its output says."""
        self.thread.join(timeout=5)  # processes that it left behind may hold the pipe open
        return cause(bytes(self.kept or b"").decode("utf-8", errors="replace"))
