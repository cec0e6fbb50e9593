"""Let a model read a prefix under a law, and then probes under one way of choosing far keys after another.

`benchmarks/choosing.py` measures with it; `benchmarks/ways.py` has the ways.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from rpe3d.attention import attention
from rpe3d.config import ConfigError
from rpe3d.geometry import Law
from rpe3d.geometry.region import Choice, Turn
from rpe3d.rotation import cos_sin, rotate
from ways import SUMMARIES, Way, nsa, odd, representatives, spans, votes_for_keys

PIECE = 16384  # tokens of the prefix in one forward
TILE = 512  # queries of one mask
EARLIER = 0.8  # weight of each earlier query, of the one after it
WITNESSES, CENTRE = 16, 2048  # last keys that vote, and keys whose mean is 0
LEAST = math.log(1e-30)  # log-share of a block below which only the witnesses tell blocks apart
BARE = Turn(stride=0.0)  # turns a vector back to what it was before RoPE


class Study:
    """A model that reads a prefix under a dense law, and then probes under one way after another.

    Shapes: g key heads, n query heads of each, t tokens of all probes, s keys, d head dim, m blocks.
    """

    way: Way | None = None  # None while the prefix is read
    cache: Any
    start: int  # tokens of the prefix
    within: Tensor  # place of each token in its probe
    probe: Tensor  # number of the probe of each token
    watched: bool = False  # whether `received` is kept, which costs another pass over the near keys of a prefix
    reading: bool = False  # whether what is read is the prefix
    received: dict[int, Tensor]  # by layer: attention that each key got from near queries of the prefix [g, n, s]

    def __init__(self, model: Any, law: Law) -> None:
        self.model = model
        self.law: Any = law
        self.interleaved = law.rotary.interleaved
        self.theta = law.frequencies().to(model.device)
        AttentionInterface.register("choosing", self.attend)
        AttentionMaskInterface.register("choosing", lambda *_, **__: None)
        model.config._attn_implementation = "choosing"

    def read(self, prefix: Sequence[int], way: Way | None = None) -> None:
        """Read a prefix under the law, or chunk by chunk under a way; the probes that follow see its keys."""
        if len(prefix) < self.law.window + self.law.chunk:
            raise ConfigError(f"no key of {len(prefix)} tokens is far for all probes", "raise --length")
        self.way, self.start, self.cache = way, 0, DynamicCache(config=self.model.config)
        self.received, self.reading = {}, True
        device = self.model.device
        with torch.no_grad():
            for piece in torch.tensor([prefix], device=device).split(self.law.chunk if way else PIECE, dim=1):
                self.within = torch.arange(piece.shape[1], device=device)
                self.probe = torch.zeros_like(self.within)
                places = {"position_ids": (self.start + self.within)[None], "past_key_values": self.cache}
                self.model(piece, use_cache=True, logits_to_keep=1, **places)
                self.start += piece.shape[1]
        self.reading = False

    def nats(self, probes: Sequence[Sequence[int]], way: Way) -> list[tuple[Tensor, Tensor]]:
        """Return the nats of each probe's tokens but the first, and whether each was the most likely token."""
        lengths = [len(ids) for ids in probes]
        if max(lengths) > self.law.window:  # a key of the probe would be far
            raise ConfigError(f"a probe has {max(lengths)} tokens, the window {self.law.window}", "use a larger model")
        if self.law.chunk % way.block:
            raise ConfigError(f"{way.name}: its blocks do not divide chunks of {self.law.chunk}", "leave it out")
        device = self.model.device
        self.way = way
        self.within = torch.cat([torch.arange(length, device=device) for length in lengths])
        self.probe = torch.arange(len(probes), device=device).repeat_interleave(torch.tensor(lengths, device=device))
        ids = torch.tensor([token for probe in probes for token in probe], device=device)
        places = {"position_ids": (self.start + self.within)[None], "past_key_values": self.cache}
        with torch.no_grad():
            logits = self.model(ids[None], use_cache=True, **places).logits[0].float()
        self.cache.crop(-len(ids))
        log = logits.log_softmax(-1)[:-1]
        nats, hit = -log.gather(1, ids[1:, None])[:, 0], log.argmax(-1) == ids[1:]
        ends = torch.tensor(lengths).cumsum(0).tolist()
        parts = [slice(end - length, end - 1) for end, length in zip(ends, lengths, strict=True)]
        return [(nats[part], hit[part]) for part in parts]

    def attend(
        self, layer: Any, q: Tensor, k: Tensor, v: Tensor, _: Any, scaling: float, **__: Any
    ) -> tuple[Tensor, None]:
        """Serve a layer of the model, whose q and k are rotated by stock RoPE."""
        grouped = scaling * q[0].float().unflatten(0, (k.shape[1], -1))
        if self.way is None:
            out, log = attention(q, k, v, self.law, rotated=True, scale=scaling)
        else:  # in float32: scores reach 35 000 in Qwen2.5's first layer, where bfloat16 would be 256 apart
            received = self.received.get(layer.layer_idx)
            way = self.way.there if self.way.there and layer.layer_idx in self.way.layers else self.way
            found, total = self.look(way, grouped, k[0].float(), v[0].float(), received)
            out, log = found.flatten(0, 1)[None].to(q.dtype), total.flatten(0, 1)[None]
        if self.reading and self.watched:
            self.watch(layer.layer_idx, grouped, k[0].float(), log[0].float().unflatten(0, (k.shape[1], -1)))
        return out.transpose(1, 2), None

    def watch(self, layer: int, q: Tensor, k: Tensor, log: Tensor) -> None:
        """Add the weight that queries [g, n, t, d] of the prefix give each key of their window; `log` of their rows."""
        keys, chunk = torch.arange(k.shape[1], device=k.device), self.law.chunk
        known = self.received.get(layer, q.new_zeros(*q.shape[:2], 0))
        got = torch.nn.functional.pad(known, (0, k.shape[1] - known.shape[2]))
        for begin in range(0, q.shape[2], chunk):  # pieces begin with a chunk
            rows = slice(begin, begin + chunk)
            position = self.start + self.within[rows]
            first = max(0, int(position[0]) // chunk - self.law.near_chunks) * chunk
            near = slice(first, int(position[-1]) + 1)
            scores = torch.einsum("gntd,gsd->gnts", q[:, :, rows], k[:, near]) - log[:, :, rows, None]
            got[..., near] += scores.masked_fill_(keys[near] > position[:, None], -torch.inf).exp_().sum(2)
        self.received[layer] = got

    def look(self, way: Way, q: Tensor, k: Tensor, v: Tensor, received: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return attention of the probes [g, n, t, d] to near keys and far blocks that they choose, and its log-sum."""
        position, start, chunk = self.start + self.within, self.start, self.law.chunk
        edge = (position[:, None] // chunk - self.law.near_chunks).clamp(min=0) * chunk  # keys before it are far
        first, last = int(edge.min()), int(edge.max())
        place = torch.cat([torch.arange(first, start, device=q.device), position])
        mine = torch.cat([place.new_ones(len(self.probe), start - first), self.probe == self.probe[:, None]], 1).bool()
        seen = mine & (place <= position[:, None]) & (place >= edge)
        near_out, near_log = attend_blocks(q, k[:, first:], v[:, first:], seen[None], seen)
        if not last:
            return near_out, near_log

        region, keys = self.law.regions[-1], torch.arange(last, device=q.device)
        fade = region.fade if way.faded else None
        sharpness = 1.0 if fade is None else fade.sharpness(position).float()[:, None]
        far_q, far_k = self.turned(q, position, region.query), self.turned(k[:, :last], keys, region.key)
        far = keys[:: way.block] < edge
        picked = far[None]
        if way.summary == "spans":
            visible = self.spans(way, q, k[:, :last], keys < edge)[None, None]
        elif way.summary:
            if way.unrotated:
                scored = self.turned(q, position, BARE), self.turned(k[:, :last], keys, BARE)
            else:
                scored = far_q, far_k
            if way.summary == "nsa":
                blocks = torch.einsum("gntd,gmd->gntm", far_q, far_k.unflatten(1, (-1, way.block)).mean(2))
                votes = nsa(
                    blocks.masked_fill(~picked[0], -torch.inf), self.near_blocks(way, q, k[:, first:], seen, place)
                )
            elif way.summary == "representatives":
                votes = self.represented(way, q, k[:, :last], received).repeat(k.shape[0], 1, 1)
            elif way.aim is None:
                votes = self.votes(way, *scored, near_log, sharpness, picked[0])
            else:
                votes = self.aimed(way, q, k, picked[0])
            if way.z or way.cosine or way.alone:
                votes = (0 if way.alone else votes.clamp(min=LEAST)) + self.likeness(way, k, picked[0])
            best = self.first_and_best(way, votes.masked_fill(~picked, -torch.inf), 1 - way.part)
            if way.part:
                votes = self.aimed(replace(way, aim=math.inf), q, k, picked[0])
                best |= self.first_and_best(way, votes.masked_fill(~picked, -torch.inf), way.part)
            if way.coarse:
                best |= self.coarse(way, q, k, keys, edge)
            picked = picked & best
        if way.summary == "spans":
            far_out, far_log = attend_seen(far_q * sharpness, far_k, v[:, :last], visible)
        else:
            far_out, far_log = attend_blocks(far_q * sharpness, far_k, v[:, :last], picked, far)
        if fade is not None:  # as rpe3d.attention.reference has it
            eased, loss = fade.shift(position).float()
            far_log = far_log - eased * far_log - loss
        seen_out, seen_log = merged(near_out, near_log, far_out, far_log)
        if not way.rest:
            return seen_out, seen_log
        return merged(seen_out, seen_log, *self.rest(way, far_q, far_k, k[:, :last], v[:, :last], picked, far))

    def coarse(self, way: Way, q: Tensor, k: Tensor, keys: Tensor, edge: Tensor) -> Tensor:
        """Return which blocks [g, t, m] lie in larger ones that are chosen by the same rule."""
        large = replace(way, block=way.coarse, lead=way.coarse // 2, wide=way.coarse * 3 // 2)
        far = keys[:: large.block] < edge
        votes = self.aimed(large, q, k, far).masked_fill(~far, -torch.inf)
        return self.first_and_best(large, votes, 1.0).repeat_interleave(large.block // way.block, -1)

    def rest(
        self, way: Way, far_q: Tensor, far_k: Tensor, k: Tensor, v: Tensor, picked: Tensor, far: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return attention of the probes to what they see of far blocks [t, m] beside those picked, and its log-sum.

        `far_q` and `far_k` stand where bounded positions have them, `k` where stock RoPE does. The law's fade is that
        of the rest alone: together it weighs (Σ e^{τ s})^{1/τ} (R / p)^fade, times e^plus.
        """
        fade, position = self.law.regions[-1].fade, self.start + self.within
        left = far.expand_as(picked) if way.rest == "all" else far & ~picked
        if way.sharp is not None:
            fade = replace(fade, focus=way.sharp * fade.focus)
            far_q = far_q * fade.sharpness(position).float()[:, None]
        if way.rest in ("all", "keys"):
            out, log = attend_blocks(far_q, far_k, v, left, far)
        else:
            one_k, one_v = self.one_of_each(way, far_k, k, v)
            out, log = attend_blocks(far_q, one_k, one_v, left, far)
            log = log + math.log(way.block)
        if way.sharp is not None:
            eased, loss = fade.shift(position).float()
            log = log - eased * log - loss
        some = left.any(-1)[:, None]  # where as many blocks are chosen as there are none is left
        return torch.where(some[..., None], out, 0.0), torch.where(some, log + way.plus, -torch.inf)

    def one_of_each(self, way: Way, far_k: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the key and the value [g, m, d] that stand for each far block, as `ways.PARTS` has it."""
        blocks, values = (x.unflatten(1, (-1, way.block)) for x in (far_k, v))
        if way.rest == "mean":
            return blocks.mean(2), values.mean(2)
        keys = torch.arange(k.shape[1], device=k.device)
        bare = self.turned(k, keys, BARE).unflatten(1, (-1, way.block))
        if way.rest == "middle":  # a block lies within a chunk, so the mean of its angles is that of its middle
            middle = self.law.regions[-1].key.angle(keys, self.theta).unflatten(0, (-1, way.block)).mean(1)
            return self.by_angle(bare.mean(2), middle), values.mean(2)
        index = odd(bare)[:, :, None, None]
        return blocks.take_along_dim(index, 2)[:, :, 0], values.take_along_dim(index, 2)[:, :, 0]

    def near_blocks(self, way: Way, q: Tensor, k: Tensor, seen: Tensor, place: Tensor) -> Tensor:
        """Return the log-sum-exp [g, n, t] of q · mean key over the complete near blocks that a query sees."""
        near = torch.einsum("gntd,gsd->gnts", q, k)
        index = (place - place.min()) // way.block
        blocks = int(index.max()) + 1
        sums = near.new_zeros(*near.shape[:3], blocks).index_add(3, index, near.masked_fill(~seen, 0.0))
        count = sums.new_zeros(len(seen), blocks).index_add(1, index, seen.float())
        return (sums / way.block).masked_fill(count < way.block, -torch.inf).logsumexp(-1)

    def represented(self, way: Way, q: Tensor, k: Tensor, received: Tensor | None) -> Tensor:
        """Return the score [t, m] of far blocks by the keys at which the queries of the prefix looked."""
        if received is None:
            raise ConfigError(f"{way.name}: nothing watched the prefix", "set `watched` before `read`")
        keys, chunk = torch.arange(k.shape[1], device=k.device), self.law.chunk
        looked = (keys // chunk + self.law.near_chunks + 1) * chunk - keys  # queries in whose window a key was
        mean = (received[..., : len(keys)] / looked).unflatten(2, (-1, way.block))
        distant = self.turned(q, self.start + self.within, Turn(stride=0.0, start=float(self.law.window)))
        return representatives(distant, self.turned(k, keys, BARE).unflatten(1, (-1, way.block)), mean, top=way.top)

    def spans(self, way: Way, q: Tensor, k: Tensor, far: Tensor) -> Tensor:
        """Return which far keys [t, s] are seen: the first, and spans around those that a probe's queries vote for."""
        most, always = self.most_and_always(way, 1.0)
        keys = torch.arange(k.shape[1], device=k.device)
        first = keys < always * way.block
        candidate = far & ~first
        bare_q, bare_k = self.turned(q, self.start + self.within, BARE), self.turned(k, keys, BARE)
        scores = torch.einsum("gntd,gsd->gnts", bare_q, bare_k).masked_fill_(~candidate, -torch.inf)
        votes = votes_for_keys(scores, top=way.top)
        for number in range(int(self.probe.max()) + 1):
            mine = self.probe == number
            votes[mine] = votes[mine].sum(0) if way.ahead else votes[mine].cumsum(0)
        return far & (first | spans(votes * candidate, most=most - always, size=way.block))

    def votes(self, way: Way, q: Tensor, k: Tensor, near: Tensor, sharpness: Any, far: Tensor) -> Tensor:
        """Return the logarithm of each block's share [g, t, m], as the heads of a key head see it together."""
        q = sum((EARLIER**i * self.earlier(q, i, 0.0) for i in range(1, way.pool)), q)
        scores = SUMMARIES[way.summary](q.flatten(1, 2), k.unflatten(1, (-1, way.block))).unflatten(1, q.shape[1:3])
        scores = (scores * sharpness).masked_fill(~far, -torch.inf)
        if way.vote == "near":
            shares = (scores - near[..., None]).amax(1)
        else:
            shares = scores.log_softmax(-1)
            shares = shares.amax(1) if way.vote == "max" else shares.logsumexp(1)
        support = (self.earlier(shares, i, -torch.inf) + i * math.log(EARLIER) for i in range(1, way.agree))
        total: Tensor = reduce(torch.logaddexp, support, shares)
        return total

    def likeness(self, way: Way, k: Tensor, far: Tensor) -> Tensor:
        """Return how much the last keys before and at each token resemble each block [g, t, m], times its weight."""
        pooled, means = self.bare(way, k, far.shape[1])
        if way.cosine:
            return normalize(pooled, dim=-1) @ normalize(means, dim=-1).mT * way.cosine
        alike: Tensor = pooled @ means.mT
        count = far.sum(-1, keepdim=True)
        apart = alike - (alike * far).sum(-1, keepdim=True) / count
        deviation = ((apart * far).square().sum(-1, keepdim=True) / count).sqrt()
        return apart * (way.z or 1.0) / (deviation + 1e-6)

    def aimed(self, way: Way, q: Tensor, k: Tensor, far: Tensor) -> Tensor:
        """Return the score of each block [g, t, m] as `rpe3d.geometry.region.Choice` defines it."""
        assert way.aim is not None
        pooled, keys = self.bare_keys(replace(way, centred=False), k)
        first = min(Choice(most=1, size=1).centre, self.law.chunk)
        centre = keys[:, :first].mean(1, keepdim=True)
        sums = torch.nn.functional.pad(keys.double().cumsum(1), (0, 0, 1, 0))
        begin = (torch.arange(far.shape[1], device=k.device) * way.block - way.lead).clamp(min=0)
        end = torch.arange(far.shape[1], device=k.device) * way.block - way.lead + (way.wide or way.block)
        means = ((sums[:, end] - sums[:, begin]) / (end - begin)[:, None]).float()
        wish = self.turned(q, self.start + self.within, BARE).mean(1)
        weight = sum(way.decay**i for i in range(WITNESSES))
        aim = normalize(wish, dim=-1)
        if way.aim < math.inf:
            aim = normalize(pooled - weight * centre, dim=-1) + way.aim * aim
        summary = normalize(means - centre, dim=-1)
        level = (aim.bfloat16().double() @ summary.bfloat16().double().mT / Choice.STEP + 0.5).floor()
        return level + torch.arange(far.shape[1], device=k.device) / (2 * far.shape[1])  # of two alike the nearer

    def bare(self, way: Way, k: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """Return the sum of the last keys at each token, and the mean key of each block, without positions."""
        pooled, keys = self.bare_keys(way, k)
        return pooled, keys[:, : blocks * way.block].unflatten(1, (-1, way.block)).mean(2)

    def bare_keys(self, way: Way, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the last keys at each token, and all keys, without positions."""
        start, within = self.start, self.within
        place = torch.cat([torch.arange(start, device=k.device), start + within])
        bare = self.turned(k, place, BARE)
        if way.centred:
            bare = bare - bare[:, max(0, start - CENTRE) : start].mean(1, keepdim=True)
        token = torch.arange(len(within), device=k.device)
        # The last keys are the probe's own, and before its beginning those at the end of the prefix.
        last = [start + torch.where(within >= i, token, within) - i for i in range(WITNESSES)]
        pooled = torch.stack([way.decay**i * bare[:, index] for i, index in enumerate(last)]).sum(0)
        return pooled, bare

    def first_and_best(self, way: Way, votes: Tensor, part: float) -> Tensor:
        """Return which blocks are chosen [g, t, m]: the first, and those with the most votes; `part` of all."""
        most, always = self.most_and_always(way, part)
        votes[..., :always] = torch.inf
        best = votes.topk(min(most, votes.shape[-1]), -1).indices
        return torch.zeros_like(votes, dtype=torch.bool).scatter(-1, best, True)

    def most_and_always(self, way: Way, part: float) -> tuple[int, int]:
        """Return how many blocks a query may choose, `part` of all, and how many of them are always the first."""
        most = max(1, int(part * way.keys * (self.law.reach // 2)) // way.block)
        return most, Choice(most=most, size=way.block, first=way.first).always

    def turned(self, x: Tensor, position: Tensor, turn: Turn) -> Tensor:
        """Turn vectors [..., t, d] that stock RoPE has rotated to where `turn` wants them."""
        return self.by_angle(x, turn.angle(position, self.theta, stock=True))

    def by_angle(self, x: Tensor, angle: Tensor) -> Tensor:
        """Turn vectors [..., t, d] by angles of each plane."""
        cos, sin = cos_sin(angle)
        flat = x.flatten(0, -3)[None]
        return rotate(flat, None, cos, sin, interleaved=self.interleaved)[0].view_as(x)

    def earlier(self, x: Tensor, steps: int, missing: float) -> Tensor:
        """Return rows of `x` [..., t, *] from `steps` tokens earlier in the same probe, or `missing`."""
        return torch.where((self.within >= steps)[:, None], x.roll(steps, -2), missing)


def attend_seen(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention of q [g, n, t, d] to the keys [g, s, d] that are seen [*, *, t, s], and its log-sum-exp."""
    if q.device.type == "cpu":  # a third of the time of the lines below
        many = q.shape[1]
        mask = q.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)
        k, v = (x[:, None].expand(-1, many, -1, -1) for x in (k, v))
        out, log = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=1.0)
        return out, log
    scores = torch.einsum("gntd,gsd->gnts", q, k).masked_fill_(~seen, -torch.inf)
    return torch.einsum("gnts,gse->gnte", scores.softmax(-1), v), scores.logsumexp(-1)


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, may: Tensor) -> tuple[Tensor, Tensor]:
    """Return `attend_seen` for blocks of keys [*, t, m], of which others than those that `may` be [t, m] never are.

    Some queries at a time, with the keys that any of them may see: a mask for all takes as long as attention does.
    """
    k, v = (x.unflatten(1, (may.shape[1], -1)) for x in (k, v))
    parts = []
    for some, mine, use in zip(q.split(TILE, 2), seen.split(TILE, 1), may.split(TILE, 0), strict=True):
        used = use.any(0)
        keys = mine[:, None, :, used, None].expand(-1, -1, -1, -1, k.shape[2]).flatten(3)
        parts.append(attend_seen(some, k[:, used].flatten(1, 2), v[:, used].flatten(1, 2), keys))
    out, log = (torch.cat(part, 2) for part in zip(*parts, strict=True))
    return out, log


def merged(out: Tensor, log: Tensor, more_out: Tensor, more_log: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention to two sets of keys together, and its log-sum, from that to each; the second may be empty."""
    share = torch.sigmoid(more_log - log)[..., None]
    return (1 - share) * out + share * more_out, torch.logaddexp(log, more_log)
