"""The samples that a forward pass is trained on: tokens, their labels, and where the data resumes afterwards."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rpe3d.config import ConfigError

READ = "read"
"""Key of a place for the digest of everything trained on until there."""
IGNORED = -100
"""Label of a token that is not trained on."""

Place = dict[str, Any]
"""Where to resume in the data; stored in a checkpoint as JSON."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A window of text, or a conversation."""

    ids: Sequence[int]
    labels: Sequence[int]
    name: str
    """Origin of the sample."""
    after: Place = field(repr=False)
    """Place of the next sample."""


def read_so_far(before: str, samples: Iterable[Sample]) -> str:
    """Return a digest of all samples trained on, given the digest of those before."""
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
    """Return the separator of joined documents: the end-of-text token."""
    if tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has no end-of-text token to join documents with", "train without --pack")
    return [tokenizer.eos_token_id]
