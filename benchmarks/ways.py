"""Ways of choosing far blocks of keys, as values: how a block is summarised, who votes, what other evidence counts.

Four are published: Quest (`bounds`), NSA, InfLLM (`representatives`) and ReAttention (`spans`). `PUBLISHED` gives each
the number of far keys, the first keys and the positions of the way that ships, so that they differ in the choice alone.
`RESTS` choose as the way that ships does, and let a query see something of the far blocks that it did not choose, too.
`FULL` choose as the way that ships does, and in a few layers queries also see all far keys, faded, or these alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way of choosing far blocks; without a summary every far key is seen."""

    summary: str = ""  # of SUMMARIES: how a block is scored
    block: int = 32  # keys in a block
    vote: str = "max"  # of the heads of a key head: `max` or `mean` share, or `near`: the most against the near keys
    top: int = 4  # `spans`: keys that each head of a query votes for; `representatives`: keys that stand for a block
    ahead: bool = False  # `spans`: also count votes of later queries of the probe, as the authors do, which leaks
    keys: float = 1.0  # far keys chosen, as a part of half of the law's reach; 0: the first block alone
    agree: int = 1  # queries whose shares are added up: this one and earlier ones of its probe
    pool: int = 1  # queries that are added up before they score
    unrotated: bool = False  # score without positions
    z: float = 0.0  # weight of the last keys' likeness to a block, in standard deviations
    cosine: float = 0.0  # the same, as a cosine
    alone: bool = False  # choose by that likeness alone
    aim: float | None = None  # choose by a cosine with the last keys and this much of the mean query; inf: it alone
    part: float = 0.0  # with `aim`: part of the blocks that the mean query chooses alone
    lead: int = 0  # with `aim`: keys before a block with which its summary begins (8 of 24: `Choice`)
    wide: int = 0  # and how many keys it has; 0: those of the block
    decay: float = 0.9  # with `aim`: the weight of one of the last keys against that of the next
    first: int = 0  # first keys whose blocks are always seen, as `Choice` has it; 0: the first block
    centred: bool = True  # take the mean key out of it
    faded: bool = False  # fade far keys as the law does
    coarse: int = 0  # with `aim`: also choose blocks of this many keys, with as many keys again
    rest: str = ""  # of PARTS: what is seen of far blocks that are not chosen; `""`: nothing
    plus: float = 0.0  # added to the scores of the rest
    sharp: float | None = None  # the rest fades as the law has it, with this much of its focus; None: it does not
    layers: tuple[int, ...] = ()  # layers that have another way
    there: Way | None = None  # that way

    @property
    def name(self) -> str:
        """Return what the CSV calls it: the summary and whatever is not the default."""
        said = {
            f"vote {self.vote}": self.vote != "max",
            f"top {self.top}": self.top != 4,
            "ahead": self.ahead,
            f"keys x{self.keys:g}": self.keys not in (0, 1),
            f"agree {self.agree}": self.agree > 1,
            f"pool {self.pool}": self.pool > 1,
            "unrotated": self.unrotated,
            f"witness z {self.z:g}": self.z,
            f"witness cosine {self.cosine:g}": self.cosine,
            "witness alone": self.alone,
            f"aim {self.aim}": self.aim is not None,
            f"part {self.part:g} alone": self.part,
            f"lead {self.lead} of {self.wide or self.block}": self.lead,
            f"decay {self.decay:g}": self.decay != 0.9,
            f"first {self.first}": self.first,
            "uncentred": not self.centred,
            "faded": self.faded,
            f"coarse {self.coarse}": self.coarse,
            f"rest {self.rest}": self.rest,
            f"plus {self.plus:g}": self.plus,
            f"rest faded x{self.sharp or 0:g}": self.sharp is not None,
            f"in layers {'-'.join(map(str, self.layers))}: {self.there and self.there.name}": self.layers,
        }
        first = f"{self.summary if self.keys else 'first'} of {self.block}" if self.summary else "all keys"
        return " + ".join([first, *(text for text, true in said.items() if true)])


LEADS = ((4, 16), (8, 16), (8, 24), (12, 24), (16, 32))
SHIPS = Way(summary="mean", block=16, aim=1.0, lead=8, wide=24, first=128)  # `far=K` of the law
PUBLISHED = (
    Way(summary="bounds", block=16, first=128),  # Quest, with its pages of 16 keys
    Way(summary="nsa", block=16, first=128),
    Way(summary="representatives", block=128, first=128),  # InfLLM: its blocks, representatives and first keys
    Way(summary="representatives", block=16, first=128),
    Way(summary="spans", block=32, first=128),  # ReAttention
    Way(summary="spans", block=32, ahead=True, first=128),
)
NEAR = Way(summary="mean", block=16, keys=0.0)  # near keys, and the first block, on which models rest their attention
BESIDE = replace(SHIPS, rest="all", sharp=1.0, plus=-1.0)  # `full` layers of the law
OTHERS = replace(BESIDE, rest="keys")
RESTS = (
    NEAR,
    Way(),
    SHIPS,
    replace(SHIPS, keys=2.0),
    replace(SHIPS, coarse=128),
    *(replace(SHIPS, rest="keys", sharp=1.0, plus=plus) for plus in (0.0, -1.0, -2.0)),
    *(replace(SHIPS, rest="mean", plus=plus) for plus in (0.0, 1.0)),
    replace(SHIPS, rest="middle"),
    *(replace(SHIPS, rest="odd", plus=plus) for plus in (0.0, -2.0)),
    BESIDE,
)
FULL = (
    NEAR,
    Way(),
    SHIPS,
    BESIDE,
    *(replace(SHIPS, layers=(18, 19, 20), there=way) for way in (BESIDE, OTHERS, Way(faded=True))),
)


def by_layers(count: int) -> tuple[Way, ...]:
    """Return the way that ships with all far keys beside it in three neighbouring layers, for all layers of a model."""
    groups = [tuple(range(first, min(first + 3, count))) for first in range(0, count, 3)]
    return (NEAR, Way(), SHIPS, *(replace(SHIPS, layers=group, there=BESIDE) for group in groups))


def ways() -> dict[str, Way]:
    """Return every way that taught something, by its name."""
    made = [Way(faded=True), Way(), NEAR]
    made += [*RESTS, *PUBLISHED, *(Way(summary=summary) for summary in SUMMARIES)]
    made += [Way(summary="mean", block=block) for block in (8, 16, 64)]
    made += [Way(summary="sub4", block=block) for block in (16, 64)]
    made += [Way(summary="max", block=block) for block in (16, 64, 128)]
    made += [Way(summary="sub4", keys=keys) for keys in (0.25, 0.5, 2)]
    made += [Way(summary="max", keys=keys) for keys in (0.125, 0.25)]
    made += [Way(summary="sub4", vote="mean"), Way(summary="sub4", vote="near"), Way(summary="max", vote="mean")]
    made += [Way(summary=summary, faded=True) for summary in ("sub4", "max")]
    for summary, block in (("mean", 16), ("sub4", 32)):
        one = partial(Way, summary=summary, block=block)
        made += [one(agree=4), one(agree=8), one(agree=16), one(pool=4), one(pool=8)]
        made += [one(agree=8, keys=0.5), one(agree=8, keys=2), one(agree=8, faded=True)]
        made += [one(cosine=20), one(cosine=40), one(z=2), one(z=4), one(alone=True)]
        made += [one(unrotated=True), one(unrotated=True, z=2)]
        made += [one(z=2, keys=0.5), one(z=2, vote="near"), one(z=2, faded=True)]
    made += [Way(summary="mean", block=16, cosine=10), Way(summary="mean", block=16, z=2, keys=2)]
    made += [Way(summary="mean", block=block, z=2) for block in (8, 32, 64)]
    made += [Way(summary="mean", block=16, z=2, centred=False), Way(summary="max", z=2)]
    made += [Way(summary="mean", block=16, aim=aim) for aim in (0.0, 0.25, 0.5, 1.0, 2.0)]
    made += [Way(summary="mean", block=16, aim=0.5, keys=keys) for keys in (0.5, 2)]
    made += [Way(summary="mean", block=16, aim=0.5, lead=a, wide=b) for a, b in LEADS]
    made += [Way(summary="mean", block=16, aim=0.5, lead=8, wide=24, decay=decay) for decay in (0.8, 0.95)]
    made += [Way(summary="mean", block=16, aim=0.5, lead=8, wide=24, keys=keys) for keys in (0.5, 2)]
    made += [Way(summary="mean", block=16, aim=aim, lead=8, wide=24) for aim in (0.25, 1.0, 2.0, inf)]
    before = partial(Way, summary="mean", block=16, aim=1.0, lead=8, wide=24)
    made += [before(keys=2), before(faded=True), before(part=0.25), before(part=0.5)]
    made += [before(first=first) for first in (32, 64, 128)]
    ships = partial(before, first=128)
    made += [ships(keys=keys) for keys in (0.0625, 0.125, 0.25, 0.5, 2)]
    made += [ships(faded=True)]
    made += [ships(decay=decay) for decay in (0.8, 0.7)]
    made += [Way(summary="mean", block=32, aim=0.5), Way(summary="mean", block=16, aim=0.5, faded=True)]
    made += [Way(summary="mean", block=8, agree=8), Way(summary="max", agree=8), Way(summary="max", z=2, faded=True)]
    return {way.name: way for way in made}


# Scores [g, r, m] of blocks, of the queries [g, r, d] of all heads of a key head and the keys [g, m, B, d] of blocks.
def mean(q: Tensor, k: Tensor) -> Tensor:
    """Score a block by its mean key."""
    return q @ k.mean(2).mT


def bounds(q: Tensor, k: Tensor) -> Tensor:
    """Score a block by the most that a key within its bounds could have (Quest)."""
    return q.clamp(min=0) @ k.amax(2).mT + q.clamp(max=0) @ k.amin(2).mT


def gauss(q: Tensor, k: Tensor) -> Tensor:
    """Score a block by its log-sum-exp, were its keys normal with a diagonal covariance."""
    return mean(q, k) + 0.5 * q.square() @ k.var(2, correction=0).mT


def largest(q: Tensor, k: Tensor) -> Tensor:
    """Score a block by its best key: the truth, at the cost of every key."""
    scores: Tensor = (q @ k.flatten(1, 2).mT).unflatten(-1, k.shape[1:3])
    return scores.amax(-1)


def best_mean(q: Tensor, k: Tensor, *, size: int) -> Tensor:
    """Score a block by the best of the means of `size` neighbours."""
    return largest(q, k.unflatten(2, (-1, size)).mean(3))


def sparq(q: Tensor, k: Tensor, *, components: int) -> Tensor:
    """Score a block by its best key, as the largest components of the query see it (SparQ)."""
    top = q.abs().topk(components, -1).indices
    return largest(torch.zeros_like(q).scatter(-1, top, q.gather(-1, top)), k)


def low_rank(q: Tensor, k: Tensor, *, rank: int) -> Tensor:
    """Score a block by its best key, in the leading principal components of all far keys."""
    centred = k - k.mean((1, 2), keepdim=True)
    flat = centred.flatten(1, 2)
    basis = torch.linalg.eigh(flat.mT @ flat).eigenvectors[..., -rank:]
    return largest(q @ basis, centred @ basis[:, None])


# Published ways whose scores are more than a product of a query and a block. n heads of each key head, t queries.
def nsa(far: Tensor, near: Tensor) -> Tensor:
    """Return the logarithm of each far block's importance [g, t, m] (NSA, arXiv 2502.11089).

    p = softmax(q · compressed keys) over all complete blocks, near ones included, summed over the heads of a key head.
    `far` [g, n, t, m] are the scores of far blocks, `near` [g, n, t] the log-sum-exp of those of near ones. NSA learns
    its compression of overlapping blocks; untrained, a compressed key is the mean of the block that is chosen.
    """
    every = torch.logaddexp(far.logsumexp(-1), near)
    return (far - every[..., None]).logsumexp(1)


def representatives(q: Tensor, k: Tensor, received: Tensor, *, top: int) -> Tensor:
    """Return the score of each block [t, m] for a whole layer (InfLLM, arXiv 2402.04617).

    The `top` keys of a block that received most attention from local queries [g, n, m, B] stand for it, others for each
    head. A block scores the sum of q · k over them and over all heads, so a layer makes one choice. As in the authors'
    code, queries [g, n, t, d] all stand at the window's distance, and keys [g, m, B, d] have no positions. The authors
    take the mean query of up to 512 while they read a prompt; here every query chooses for itself, as when they decode.
    """
    best = received.topk(top, -1).indices[..., None]
    chosen = k[:, None].take_along_dim(best, 3).sum(3)
    return torch.einsum("gntd,gnmd->tm", q, chosen)


def votes_for_keys(scores: Tensor, *, top: int) -> Tensor:
    """Return how many heads of a layer have each key among their `top` best [t, s] (ReAttention, arXiv 2407.15176).

    Scores [g, n, t, s] are q · k without positions, -inf where a key is no candidate. The authors add up votes of 512
    queries and show all of them what won, so that a token sees what later ones asked for; see `Way.ahead`.
    """
    best = scores.topk(top, -1)
    voted = best.values.isfinite().long().permute(2, 0, 1, 3).flatten(1)
    none = torch.zeros(scores.shape[2:], dtype=torch.long, device=scores.device)
    return none.scatter_add(1, best.indices.permute(2, 0, 1, 3).flatten(1), voted)


def spans(votes: Tensor, *, most: int, size: int) -> Tensor:
    """Return which keys lie in spans of `size` keys around the `most` keys with the most votes [t, s] (ReAttention).

    Of two with as many votes the nearer, which the authors leave to their sort. Spans that overlap hold fewer keys.
    """
    keys = votes.shape[1]
    rank = votes * keys + torch.arange(keys, device=votes.device)
    best = rank.topk(min(most, keys), -1).indices
    centres = torch.zeros_like(votes).scatter(1, best, (votes.gather(1, best) > 0).long())
    before = torch.nn.functional.pad(centres.cumsum(1), (1, 0))
    place = torch.arange(keys, device=votes.device)
    first, last = place - (size - 1) // 2, place + size // 2  # a centre c has the keys c - size / 2 .. c + size / 2 - 1
    return before[:, (last + 1).clamp(max=keys)] > before[:, first.clamp(min=0)]


def odd(k: Tensor) -> Tensor:
    """Return the place [g, m] of the key that is farthest from the mean of its block, of bare keys [g, m, B, d]."""
    away: Tensor = (k - k.mean(2, keepdim=True)).norm(dim=-1)
    return away.argmax(-1)


PARTS = ("all", "keys", "mean", "middle", "odd")
"""What may be seen of a block that is not chosen. `keys`: every key of it; `all`: every key of every far block, chosen
ones once more. The others are one key and one value that weigh as much as all keys of a block with that score would:
`mean`, the mean of its keys, each where it stands (so the score is the mean score), and of its values; `middle`, the
mean of its keys without positions, set to the block's middle, and of its values; `odd`, the key that is least like the
mean of its block, and its value."""
SUMMARIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": mean,
    "bounds": bounds,
    "gauss": gauss,
    "sub4": partial(best_mean, size=4),
    "max": largest,
    "sparq16": partial(sparq, components=16),
    "rank16": partial(low_rank, rank=16),
    "rank32": partial(low_rank, rank=32),
}
WAYS = ways()
ALL = Way(faded=True)  # what the others are compared with
FINDERS = (Way(), ALL)  # ways that see every key; what they find likely and `NEAR` does not needs the far text
