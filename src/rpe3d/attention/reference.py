"""Compute attention under a law by its definition: dense, readable, up to float64, for any law, with gradients.

It is chosen if nothing else runs a problem. Every other implementation must equal it: it is the specification.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rpe3d.attention.chooser import Chooser
from rpe3d.attention.problem import Prepared, Problem
from rpe3d.config import ConfigError
from rpe3d.geometry import Region
from rpe3d.rotation import cos_sin, rotate

Choosers = dict[Region, Chooser]
HELD = 1.0
"""Nats by which the pairs of a law beside another are held back (docs/log.md)."""


def refusal(problem: Problem) -> str | None:
    """Return None: every problem can run."""
    return None


def prepare(problem: Problem) -> Prepared:
    """Return the problem as a function of its vectors."""
    hollow = problem.hollow()
    return lambda q, k, v, sinks: attend(replace(hollow, q=q, k=k, v=v, sinks=sinks))


def attend(x: Problem, choosers: Choosers | None = None) -> tuple[Float[Tensor, "b h t e"], Float[Tensor, "b h t"]]:
    """Return softmax(scale · q k*) v with each pair's own turn and fading; the output and the log-sum-exp of every row.

    A pair is visible if both are tokens, the key does not come after the query, and a region of the law holds it; and
    if the query chooses the key, where the region gives it a choice. The pairs of a law beside it (`Law.both`) join
    the softmax with their weights times e^-HELD. A row that sees nothing is zeros, and its log-sum-exp -inf (or the
    sink's alone). What lies in padding does not matter, not even NaN.
    """
    if x.key_mask is not None:
        padding = ~x.key_mask[:, None, :, None]
        x = replace(x, k=x.k.masked_fill(padding, 0.0), v=x.v.masked_fill(padding, 0.0))
    logs, values = _logs(x, choosers), x.v
    if x.law.both is not None:
        logs = torch.cat([logs, _logs(replace(x, law=x.law.both[1])) - HELD], dim=-1)
        values = torch.cat([values, values], dim=2)
    if x.sinks is not None:
        sink = x.sinks.to(logs.dtype)[None, :, None, None].expand(*logs.shape[:3], 1)
        logs = torch.cat([logs, sink], dim=-1)
    lse = logs.logsumexp(-1)
    weights = torch.exp(logs - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return (weights[..., : values.shape[2]] @ _each_head(values, x).to(logs.dtype)).to(x.q.dtype), lse


def _logs(x: Problem, choosers: Choosers | None = None) -> Float[Tensor, "b h t s"]:
    """Return the log of every pair's weight in a row: its score after softcap and fading; -inf if it is not seen."""
    precise = torch.float64 if x.q.dtype == torch.float64 else torch.float32
    scores = _scores(x, x.q.to(precise), _each_head(x.k, x).to(precise)) * x.scale
    if x.softcap is not None:
        scores = x.softcap * torch.tanh(scores / x.softcap)
    seen = visible(x)[:, None] & chosen(x, choosers)
    return _faded(x, scores, seen).masked_fill(~seen, -torch.inf)


def _each_head(y: Float[Tensor, "b g s d"], x: Problem) -> Float[Tensor, "b h s d"]:
    """Return keys or values of each query head."""
    return y.repeat_interleave(x.q.shape[1] // x.k.shape[1], dim=1)


def _scores(x: Problem, q: Float[Tensor, "b h t d"], k: Float[Tensor, "b h s d"]) -> Float[Tensor, "b h t s"]:
    """Return q k*, rotated by the region that each pair lies in."""
    query, key = x.positions()
    theta = x.frequencies
    scores = torch.zeros(*q.shape[:3], k.shape[2], dtype=q.dtype, device=q.device)
    for region in x.law.regions:
        turned = []
        for vectors, turn, positions in ((q, region.query, query), (k, region.key, key)):
            cos, sin = cos_sin(x.angles(turn, positions, theta), scaling=x.scaling, dtype=q.dtype)
            interleaved = x.law.rotary.interleaved
            turned.append(rotate(vectors, None, cos, sin, interleaved=interleaved, impl="reference")[0])
        scores = torch.where(region.contains(*_pairs(x))[:, None], turned[0] @ turned[1].transpose(-1, -2), scores)
    return scores


def _faded(x: Problem, scores: Float[Tensor, "b h t s"], seen: Bool[Tensor, "b n t s"]) -> Float[Tensor, "b h t s"]:
    """Return the scores after the fading of each pair's region: τ s - (1 - 1/τ) ℓ - loss, with ℓ = log Σ exp(τ s)."""
    query, key = _pairs(x)
    for region in x.law.regions:
        if region.fade is not None:
            inside = region.contains(query, key)[:, None] & seen
            position = x.positions()[0]
            eased, loss = region.fade.shift(position).to(scores.dtype)[:, :, None, :, None]
            sharp = scores * region.fade.sharpness(position).to(scores.dtype)[:, None, :, None]
            # A row without such keys has no ℓ; 0 stands in for it, so that gradients are numbers.
            some = inside.any(-1, keepdim=True)
            log = sharp.masked_fill(~inside & some, -torch.inf).logsumexp(-1, keepdim=True).masked_fill(~some, 0.0)
            scores = torch.where(inside, sharp - eased * log - loss, scores)
    return scores


def _pairs(x: Problem) -> tuple[Int[Tensor, "b t s"], Int[Tensor, "b t s"]]:
    """Return the positions of all pairs."""
    query, key = x.positions()
    query, key = torch.broadcast_tensors(query[:, :, None], key[:, None, :])
    return query, key


def choosers_of(x: Problem) -> Choosers:
    """Return a chooser that has read the keys of a problem, for each region with a choice."""
    return {region: Chooser(x, region) for region in x.law.regions if region.choice is not None}


def chosen(x: Problem, choosers: Choosers | None = None) -> Bool[Tensor, "b n t s"]:
    """Return which pairs are not excluded by a query's choice of other keys."""
    kept = torch.ones(x.q.shape[0], 1, x.q.shape[2], x.k.shape[2], dtype=torch.bool, device=x.q.device)
    for region, chooser in (choosers_of(x) if choosers is None else choosers).items():
        kept = kept & (chooser(x) | ~region.contains(*_pairs(x))[:, None])
    return kept


def visible(x: Problem) -> Bool[Tensor, "b t s"]:
    """Return which pairs attend."""
    query, key = x.positions()
    check_order("query_positions", query, x.query_mask)
    check_order("key_positions", key, x.key_mask)
    pairs = _pairs(x)
    inside: Tensor = torch.stack([region.contains(*pairs) for region in x.law.regions]).any(0) & (pairs[1] <= pairs[0])
    if x.query_mask is not None:
        inside = inside & x.query_mask[:, :, None]
    return inside if x.key_mask is None else inside & x.key_mask[:, None, :]


def check_order(name: str, positions: Tensor, mask: Tensor | None) -> None:
    """Refuse positions that decrease from one token to the next (ignoring padding)."""
    highest = positions if mask is None else positions.masked_fill(~mask, torch.iinfo(positions.dtype).min)
    highest = highest.cummax(1).values
    falls = positions[:, 1:] < highest[:, :-1]
    if mask is not None:
        falls = falls & mask[:, 1:]
    if falls.any():
        b, t = falls.nonzero()[0].tolist()
        raise ConfigError(
            f"{name} fall from {int(highest[b, t])} to {int(positions[b, t + 1])} at token {t + 1} of sequence {b}",
            "pass increasing positions; put packed sequences in one row each",
        )
