"""Several processes, one set of rows: work is dealt out, results come together in order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process and how many there are; one alone unless `accelerate launch` started more."""

    index: int = 0
    count: int = 1
    device: str | None = None
    """Where this process works, when it was launched with others."""

    @property
    def first(self) -> bool:
        return self.index == 0

    def share(self, items: Sequence[T]) -> list[tuple[int, T]]:
        """This process's part of the work, each with its number."""
        return list(enumerate(items))[self.index :: self.count]

    def gather(self, mine: T) -> list[T]:
        """What every process has, in every process."""
        if self.count == 1:
            return [mine]
        from accelerate.utils import gather_object

        return list(gather_object([mine]))

    def from_first(self, value: T) -> T:
        """The first process's value, in every process."""
        return self.gather(value)[0]


def ranks() -> Ranks:
    """This process among those that `accelerate launch` started."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Ranks()
    from accelerate import PartialState

    state: Any = PartialState(cpu=not torch.cuda.is_available())
    return Ranks(index=state.process_index, count=state.num_processes, device=str(state.device))
