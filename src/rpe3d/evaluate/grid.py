"""Fill the grid of rows of any command: finished rows are kept, and each new row is written when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from rpe3d.evaluate.ranks import Ranks
from rpe3d.evaluate.store import Key, Row, Store, locked

Progress = Callable[[str, float, float], None]
"""Called with a description of the work, the work done and the total, in estimated units of time."""
Measure = Callable[[Sequence[Key]], Iterable[tuple[Key, Row]]]
"""Measures the rows of these keys, in any order, and yields each as soon as it is done."""


def silent(what: str, done: float, total: float) -> None:
    """Ignore progress."""


def fill(store: Store, measure: Measure, here: Ranks, overwrite: bool = False) -> None:
    """Measure every unfinished row of the store; the first of several processes reads and writes.

    No other run may write to the file meanwhile. `overwrite` starts over instead of keeping finished rows.
    """
    with ExitStack() as held:

        def earlier() -> dict[str, Any] | None:
            if store.file is not None:
                held.enter_context(locked(store.file))
            return store.earlier(overwrite)

        waiting = store.take(here.together(earlier)[0])
        for key, row in measure(waiting):
            store.add(key, row)
            here.together(store.write)
