"""Compute what a law shows a model instead of the true distance, and whether the model has ever seen it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rpe3d.geometry import Law

KINDS = ("exact", "compressed", "unseen", "not attended")
"""What happens to a pair: rotated as in training; to another angle seen in training; to one never seen; left out."""


def distances(law: Law, count: int) -> Tensor:
    """Return at most `count` distances from 0 to the end of the context, evenly spaced; all of them if fewer."""
    last = law.context - 1
    return torch.linspace(0, last, min(count, law.context), dtype=torch.float64).round().to(torch.int64)


def shown(law: Law, query: Tensor | int, key: Tensor | int, plane: int = -1) -> Tensor:
    """Return the relative position that one plane is shown, phases aside; NaN for a pair that is not attended to.

    The same as `law.relative_position` where a law has a single one. Where frequencies differ from the model's, it is
    the distance at which the stock model would have turned this plane as far.
    """
    q, k = torch.broadcast_tensors(torch.as_tensor(query), torch.as_tensor(key))
    rate = (law.frequencies() / law.model_frequencies())[plane]
    f = torch.full(q.shape, torch.nan, dtype=torch.float64)
    for region in law.regions:
        seen = _of_plane(region.query.positions(q), plane) - _of_plane(region.key.positions(k), plane)
        f = torch.where(region.contains(q, k), seen * rate, f)
    return f


def _of_plane(positions: Tensor, plane: int) -> Tensor:
    return positions[..., plane if positions.shape[-1] > 1 else 0]


def kinds(law: Law, query: Tensor | int, key: Tensor | int) -> Tensor:
    """Return the place in `KINDS` of every pair.

    Within the pretrained length L_p a plane meets the angles in [0, θ_l L_p), and all of them where that is a full
    circle. A pair is unseen where any plane is turned to an angle that it has not met.
    """
    q, k = torch.broadcast_tensors(torch.as_tensor(query), torch.as_tensor(key))
    angles, theta = law.relative_angles(q, k), law.model_frequencies()
    stock = (q - k)[..., None] * theta
    unmet = (angles + 1e-6 * theta) % math.tau > theta * law.pretrained  # a millionth of a token is rounding
    exact = ((angles - stock).abs() <= 1e-9 * (1 + stock)).all(-1)
    kind = torch.where(unmet.any(-1), 2, torch.where(exact, 0, 1))
    return torch.where(angles.isnan().any(-1), 3, kind)


class Run(NamedTuple):
    """Neighbouring distances of one kind."""

    kind: str
    first: int
    last: int


def runs(law: Law, points: int = 2048) -> list[Run]:
    """Return what becomes of the distances from the last query back to the first key.

    They are looked at in `points` places, and every change between two of them is found to the token. A run that lies
    between two places is not seen.
    """
    last, places = law.context - 1, distances(law, points)
    kind = torch.cat([kinds(law, last, last - piece) for piece in places.split(2048)])
    changes = (kind[1:] != kind[:-1]).nonzero()[:, 0]
    before, low, high = kind[changes], places[changes], places[changes + 1]
    while ((gap := high - low) > 1).any():
        middle = low + gap // 2
        same = kinds(law, last, last - middle) == before
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    firsts = [0, *high.tolist()]
    ends = [*high.tolist(), law.context]
    names = [KINDS[k] for k in [*before.tolist(), int(kind[-1])]]
    return [Run(name, first, end - 1) for name, first, end in zip(names, firsts, ends, strict=True)]
