"""Share the rows of a measurement among several processes: work is dealt out, results are collected in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rpe3d.config import ConfigError
from rpe3d.evaluate.memory import out_of_memory
from rpe3d.models.devices import has_cuda
from rpe3d.models.processes import processes

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The rank of this process and the number of processes: one, unless `accelerate launch` started more."""

    index: int = 0
    count: int = 1
    device: str | None = None
    """Device of this process, if it was launched with others."""

    @property
    def first(self) -> bool:
        return self.index == 0

    def share(self, items: Sequence[T]) -> list[tuple[int, T]]:
        """Return this process's share of the work, each item with its number."""
        return list(enumerate(items))[self.index :: self.count]

    def gather(self, mine: T) -> list[T]:
        """Return every process's value, in every process."""
        if self.count == 1:
            return [mine]
        from accelerate.utils import gather_object

        return list(gather_object([mine]))

    def together(self, work: Callable[[], T]) -> list[T]:
        """Return what every process made. If one refuses or runs out of memory, all do, so that none waits forever."""
        made: list[T] = []
        failure: tuple[str, ...] | None = None
        try:
            made = [work()]
        except ConfigError as refusal:
            failure = (refusal.problem, refusal.hint)
        except Exception as error:
            if not out_of_memory(error):
                raise
            failure = ()
        parts = self.gather((made, failure))
        for _, words in parts:
            if words is not None:
                raise ConfigError(*words) if words else MemoryError
        return [item for part, _ in parts for item in part]


def ranks() -> Ranks:
    """Return the rank of this process among those that `accelerate launch` started."""
    state = processes(cpu=not has_cuda())
    if state is None:
        return Ranks()
    return Ranks(index=state.process_index, count=state.num_processes, device=str(state.device))
