"""Turn samples into the forward passes of every process: the same steps whatever the number of processes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from rpe3d.config import ConfigError
from rpe3d.train.pose import skipped_positions
from rpe3d.train.samples import IGNORED, READ, Place, Sample, read_so_far
from rpe3d.train.settings import Settings
from rpe3d.train.ulysses import SequenceParallel

PADDING = 0  # any token: nothing looks at it, and it is not learned
NAMES = "names"
"""Key under which a batch names the origin of its samples."""


@dataclass
class Steps(torch.utils.data.IterableDataset[dict[str, Any]]):
    """The forward passes of one process, step by step; `places` says where the data resumes after each."""

    samples: Iterable[Sample]
    settings: Settings
    done: int
    """Number of steps already made."""
    process: int = 0
    processes: int = 1
    parallel: SequenceParallel | None = None
    places: dict[int, Place] = field(default_factory=dict)
    read: str = ""
    """Digest of the samples of the steps already made."""

    def __post_init__(self) -> None:
        self.sharers = self.parallel.size if self.parallel else 1
        self.ranks = self.processes // self.sharers
        if self.settings.batch % (self.ranks * self.settings.micro_batch):
            raise ConfigError(
                f"a batch of {self.settings.batch} cannot be divided among {self.ranks} processes "
                f"in forwards of {self.settings.micro_batch}",
                "change batch, micro_batch or the number of processes",
            )

    @property
    def accumulation(self) -> int:
        """Number of forward passes per process in a step."""
        return self.settings.batch // (self.ranks * self.settings.micro_batch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.done >= self.settings.total_steps:  # killed between the last step and the result
            return
        for step, samples in enumerate(_ahead(self.samples, self.settings.batch), self.done + 1):
            self.places = {s: place for s, place in self.places.items() if s >= step - 2}
            self.read = read_so_far(self.read, samples)
            self.places[step] = {**samples[-1].after, READ: self.read}
            numbered = list(enumerate(samples, (step - 1) * self.settings.batch))
            mine = numbered[self.process // self.sharers :: self.ranks]
            for start in range(0, len(mine), self.settings.micro_batch):
                yield self._batch(mine[start : start + self.settings.micro_batch])

    def _batch(self, numbered: Sequence[tuple[int, Sample]]) -> dict[str, Any]:
        """Pad samples on the right, to a length that can be shared out; labels are where they are predicted."""
        longest = max(len(sample.ids) for _, sample in numbered)
        length = -(-longest // self.sharers) * self.sharers
        rows = [(n, list(s.ids), list(s.labels), length - len(s.ids)) for n, s in numbered]
        labels = torch.tensor([row + [IGNORED] * (pad + 1) for _, _, row, pad in rows])
        batch = {
            "input_ids": torch.tensor([row + [PADDING] * pad for _, row, _, pad in rows]),
            "labels": labels[:, :-1],
            "shift_labels": labels[:, 1:].contiguous(),
        }
        if self.settings.pose:
            batch["position_ids"] = torch.tensor([self._skipped(n, length) for n, *_ in rows])
        elif self.parallel is not None:
            batch["position_ids"] = torch.arange(length).expand(len(rows), -1)
        if self.parallel is not None:
            batch = {name: self.parallel.slice(x) for name, x in batch.items()}
        if self.settings.pose:
            # Without a mask transformers takes positions that skip for several sequences, and hides one from the other.
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        return {**batch, NAMES: [sample.name for _, sample in numbered]}

    def _skipped(self, number: int, length: int) -> list[int]:
        draw = random.Random(f"{self.settings.seed}:{number}")
        return skipped_positions(length, self.settings.context, self.settings.pose, draw)


def _ahead(samples: Iterable[Sample], count: int) -> Iterator[list[Sample]]:
    """Yield so many samples at a time; the next are prepared while these are trained on."""
    source = iter(samples)
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(lambda: list(islice(source, count)))
        while True:
            made = coming.result()
            coming = thread.submit(lambda: list(islice(source, count)))
            yield made
