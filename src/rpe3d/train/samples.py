"""What one forward learns from: tokens, the labels among them, and where the data resumes afterwards."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rpe3d.config import ConfigError

READ = "read"
"""The key of a place for the digest of what was learned until there."""
IGNORED = -100
"""The label of a token that is not learned."""

Place = dict[str, Any]
"""Where to resume in the data; it lies in a checkpoint as JSON."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A window of text, or a conversation."""

    ids: Sequence[int]
    labels: Sequence[int]
    name: str
    """Where it came from."""
    after: Place = field(repr=False)
    """The place of the sample that follows."""


def read_so_far(before: str, samples: Iterable[Sample]) -> str:
    """Return a digest of all samples that were learned, given the digest of those before."""
    digest = hashlib.sha256(before.encode())
    for sample in samples:
        digest.update(repr((list(sample.ids), list(sample.labels))).encode())
    return digest.hexdigest()


def shuffled(count: int, seed: int, epoch: int) -> list[int]:
    """Return the order of the documents in an epoch."""
    order = list(range(count))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def ending(tokenizer: Any) -> list[int]:
    """Return what separates joined documents: the end-of-text token."""
    if tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has no end-of-text token to join documents with", "train without --pack")
    return [tokenizer.eos_token_id]
