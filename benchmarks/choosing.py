"""Measure ways of choosing a few far blocks of keys: what each keeps of plain text, of copies and of needles.

    python benchmarks/choosing.py --model default --text FILE --text FILE --length 32k --out DIR
    python benchmarks/choosing.py --model default --text FILE --length 32k --out DIR --only "mean of 16,all keys"

A prefix with four needles in it is read once under `3d-rpe`, which attends to every far key. Probes follow: the next
tokens of the text, three passages of the prefix, four questions. A probe sees the prefix and itself, and each of its
queries chooses far blocks from what precedes it. The prefix is the same for all ways, so a difference is the choice of
the probes alone. Vectors of probes are float32. Differences are to `all keys + faded`, which is the law itself; their
standard error is over texts. Writes choosing-<model>.csv after every text, and keeps rows of other lengths and ways.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from rpe3d.attention import attention
from rpe3d.cli.arguments import size
from rpe3d.config import ConfigError, choice
from rpe3d.evaluate.texts import Text, read_texts
from rpe3d.geometry import Law, make_law
from rpe3d.geometry.region import Choice, Turn
from rpe3d.models import facts
from rpe3d.models.load import load
from rpe3d.rotation import cos_sin, rotate
from rpe3d.text import encode, opening
from stamp import COLUMNS, stamp
from ways import ALL, SUMMARIES, WAYS, Way

TEXT, COPY, SHOWN = 512, 160, 24  # tokens of text, of a passage, and of a passage before its nats count
NEEDLES, PASSAGES, SPREAD = (0.08, 0.25, 0.42, 0.59), (0.03, 0.17, 0.34), 0.02  # places, as parts of the prefix
WORDS = ("amber", "cobalt", "walnut", "tundra", "velvet", "harbor", "meadow", "lantern", "pepper", "saddle")
NEEDLE = "\nOne of the special magic numbers for {} is: {}.\n"
ABOUT = "the special magic number for {} mentioned in the text above"
QUESTION = f"\n\nQuestion: What is {ABOUT}?\nAnswer: The{ABOUT[3:]} is:"
PIECE = 16384  # tokens of the prefix in one forward
EARLIER = 0.8  # weight of each earlier query, of the one after it
WITNESSES, WITNESS, CENTRE = 16, 0.9, 2048  # last keys that vote, weight of each earlier one, keys whose mean is 0
LEAST = math.log(1e-30)  # log-share of a block below which only the witnesses tell blocks apart
BARE = Turn(stride=0.0)  # turns a vector back to what it was before RoPE
KINDS = ("text", "copy", "needle")
DIFFERENCES = tuple(f"{kind}_{what}" for kind in KINDS for what in ("diff", "se"))
NUMBERS = ("model", "length", "way", "texts", *(f"{kind}_nats" for kind in KINDS), "found", "needles")
FIELDS = (*COLUMNS, *NUMBERS, *DIFFERENCES, "found_all")


class Study:
    """A model that reads a prefix under a dense law, and then probes under one way after another.

    Shapes: g key heads, n query heads of each, t tokens of all probes, s keys, d head dim, m blocks.
    """

    way: Way | None = None  # None while the prefix is read
    cache: Any
    start: int  # tokens of the prefix
    within: Tensor  # place of each token in its probe
    probe: Tensor  # number of the probe of each token

    def __init__(self, model: Any, law: Law) -> None:
        self.model = model
        self.law: Any = law
        self.interleaved = law.rotary.interleaved
        self.theta = law.frequencies().to(model.device)
        AttentionInterface.register("choosing", self.attend)
        AttentionMaskInterface.register("choosing", lambda *_, **__: None)
        model.config._attn_implementation = "choosing"

    def read(self, prefix: Sequence[int]) -> None:
        """Read a prefix under the law; the probes that follow see its keys."""
        if len(prefix) < self.law.window + self.law.chunk:
            raise ConfigError(f"no key of {len(prefix)} tokens is far for all probes", "raise --length")
        self.way, self.start, self.cache = None, len(prefix), DynamicCache(config=self.model.config)
        with torch.no_grad():
            for piece in torch.tensor([prefix], device=self.model.device).split(PIECE, dim=1):
                self.model(piece, past_key_values=self.cache, use_cache=True, logits_to_keep=1)

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
        self, _: Any, q: Tensor, k: Tensor, v: Tensor, __: Any, scaling: float, **___: Any
    ) -> tuple[Tensor, None]:
        """Serve a layer of the model, whose q and k are rotated by stock RoPE."""
        if self.way is None:
            out, _ = attention(q, k, v, self.law, rotated=True, scale=scaling)
        else:  # in float32: scores reach 35 000 in Qwen2.5's first layer, where bfloat16 would be 256 apart
            grouped = q[0].float().unflatten(0, (k.shape[1], -1))
            out = self.look(self.way, scaling * grouped, k[0].float(), v[0].float()).flatten(0, 1)[None].to(q.dtype)
        return out.transpose(1, 2), None

    def look(self, way: Way, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention of the probes [g, n, t, d] to near keys and to the far blocks they choose."""
        position, start, chunk = self.start + self.within, self.start, self.law.chunk
        edge = (position[:, None] // chunk - self.law.near_chunks) * chunk  # keys before it are far
        first, last = int(edge.min()), int(edge.max())
        place = torch.cat([torch.arange(first, start, device=q.device), position])
        mine = torch.cat([place.new_ones(len(self.probe), start - first), self.probe == self.probe[:, None]], 1).bool()
        seen = mine & (place <= position[:, None]) & (place >= edge)
        near = torch.einsum("gntd,gsd->gnts", q, k[:, first:]).masked_fill(~seen, -torch.inf)
        near_log = near.logsumexp(-1)
        near_out = torch.einsum("gnts,gse->gnte", near.softmax(-1), v[:, first:])

        region, keys = self.law.regions[-1], torch.arange(last, device=q.device)
        fade = region.fade if way.faded else None
        sharpness = 1.0 if fade is None else fade.sharpness(position).float()[:, None]
        far_q, far_k = self.turned(q, position, region.query), self.turned(k[:, :last], keys, region.key)
        picked = (keys[:: way.block] < edge)[None]
        if way.summary:
            if way.unrotated:
                scored = self.turned(q, position, BARE), self.turned(k[:, :last], keys, BARE)
            else:
                scored = far_q, far_k
            if way.aim is None:
                votes = self.votes(way, *scored, near_log, sharpness, picked[0])
            else:
                votes = self.aimed(way, q, k, picked[0])
            if way.z or way.cosine or way.alone:
                votes = (0 if way.alone else votes.clamp(min=LEAST)) + self.likeness(way, k, picked[0])
            picked = picked & self.first_and_best(way, votes.masked_fill(~picked, -torch.inf))
        visible = picked[:, None].repeat_interleave(way.block, -1)
        far = (torch.einsum("gntd,gsd->gnts", far_q, far_k) * sharpness).masked_fill(~visible, -torch.inf)
        far_log = far.logsumexp(-1)
        far_out = torch.einsum("gnts,gse->gnte", far.softmax(-1), v[:, :last])
        if fade is not None:  # as rpe3d.attention.reference has it
            eased, loss = fade.shift(position).float()
            far_log = far_log - eased * far_log - loss
        share = torch.sigmoid(far_log - near_log)[..., None]
        return (1 - share) * near_out + share * far_out

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
        aim = normalize(pooled - weight * centre, dim=-1) + way.aim * normalize(wish, dim=-1)
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

    def first_and_best(self, way: Way, votes: Tensor) -> Tensor:
        """Return which blocks are chosen [g, t, m]: the first, and those with the most votes."""
        votes[..., 0] = torch.inf
        most = max(1, int(way.keys * (self.law.reach // 2)) // way.block)
        best = votes.topk(min(most, votes.shape[-1]), -1).indices
        return torch.zeros_like(votes, dtype=torch.bool).scatter(-1, best, True)

    def turned(self, x: Tensor, position: Tensor, turn: Turn) -> Tensor:
        """Turn vectors [..., t, d] that stock RoPE has rotated to where `turn` wants them."""
        cos, sin = cos_sin(turn.angle(position, self.theta, stock=True))
        flat = x.flatten(0, -3)[None]
        return rotate(flat, None, cos, sin, interleaved=self.interleaved)[0].view_as(x)

    def earlier(self, x: Tensor, steps: int, missing: float) -> Tensor:
        """Return rows of `x` [..., t, *] from `steps` tokens earlier in the same probe, or `missing`."""
        return torch.where((self.within >= steps)[:, None], x.roll(steps, -2), missing)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Tokens that follow the prefix; the nats of those from `skip` on count, and never that of the first."""

    kind: str
    ids: list[int]
    skip: int = 1


def prefix_and_probes(
    tokenizer: Any, text: Text, length: int, window: int, draw: random.Random
) -> tuple[list[int], list[Probe]]:
    """Return a text's first tokens with four needles among them, and the probes that follow."""
    ids = [*opening(tokenizer), *encode(tokenizer, text.content[: 8 * (length + TEXT)])]
    following = min(TEXT, window)
    if len(ids) < length + following:
        raise ConfigError(f"{text.name} has {len(ids)} tokens, not {length + following}", "give a longer --text")
    magic = {word: str(draw.randrange(10**6, 10**7)) for word in draw.sample(WORDS, len(NEEDLES))}

    def place(part: float) -> int:
        return int(length * (part + SPREAD * draw.random()))

    for part, (word, number) in zip(NEEDLES, magic.items(), strict=True):
        at = place(part)
        ids[at:at] = encode(tokenizer, NEEDLE.format(word, number))
    probes = [Probe(kind="text", ids=ids[length : length + following])]
    for at in map(place, PASSAGES):
        probes.append(Probe(kind="copy", ids=ids[at : at + COPY], skip=SHOWN))
    for word, number in magic.items():
        question, both = (encode(tokenizer, QUESTION.format(word, word) + end) for end in ("", f" {number}"))
        probes.append(Probe(kind="needle", ids=both, skip=len(question)))
    return ids[:length], probes


def measure(study: Study, probes: Sequence[Probe], way: Way) -> dict[str, float]:
    """Return the mean nats of each kind of probe under a way, and how many needles were found."""
    nats: dict[str, list[float]] = {kind: [] for kind in KINDS}
    found = 0
    for probe, (each, hit) in zip(probes, study.nats([probe.ids for probe in probes], way), strict=True):
        nats[probe.kind].append(float(each[probe.skip - 1 :].mean()))
        found += probe.kind == "needle" and bool(hit[probe.skip - 1 :].all())
    return {kind: statistics.fmean(values) for kind, values in nats.items()} | {"found": found}


def row(way: str, mine: Sequence[Mapping[str, float]], base: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the numbers of a way on some texts, beside those of attending to every key on the same ones."""
    made: dict[str, Any] = {"way": way, "texts": len(mine), "needles": len(NEEDLES) * len(mine)}
    for kind in KINDS:
        differences = [a[kind] - b[kind] for a, b in zip(mine, base, strict=True)]
        made[f"{kind}_nats"] = round(statistics.fmean(one[kind] for one in mine), 4)
        made[f"{kind}_diff"] = round(statistics.fmean(differences), 4)
        if len(mine) > 1:
            made[f"{kind}_se"] = round(statistics.stdev(differences) / math.sqrt(len(mine)), 4)
    return made | {"found": sum(one["found"] for one in mine), "found_all": sum(one["found"] for one in base)}


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the CSV; rows that it holds of other lengths and ways stay."""
    kept: list[Mapping[str, Any]] = []
    if path.exists():
        with path.open(newline="") as file:
            made = {(str(one["length"]), one["way"]) for one in rows}
            kept = [one for one in csv.DictReader(file) if (one["length"], one["way"]) not in made]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*kept, *rows])


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    print(f"\n{'way':42} {'text':>7} {'diff':>8} {'± se':>7} {'copy':>7} {'diff':>8} {'needle':>7} {'diff':>8} found")
    for one in rows:
        text = f"{one['text_nats']:7.4f} {one['text_diff']:+8.4f} {one.get('text_se', math.nan):7.4f}"
        rest = " ".join(f"{one[f'{kind}_nats']:7.3f} {one[f'{kind}_diff']:+8.3f}" for kind in KINDS[1:])
        print(f"{one['way']:42} {text} {rest} {one['found']:>2}/{one['needles']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="`default`, or a folder")
    parser.add_argument("--text", type=Path, action="append", required=True, help="file to read; may be repeated")
    parser.add_argument("--length", type=size, required=True, help="tokens of the prefix, e.g. 32k")
    parser.add_argument("--out", type=Path, required=True, help="folder for the CSV")
    parser.add_argument("--only", default=",".join(WAYS), help="ways to measure, with commas between; default all")
    given = parser.parse_args()
    chosen = {ALL.name: ALL} | {name: WAYS[choice("way", name, WAYS)] for name in given.only.split(",")}
    texts = read_texts(given.text)
    loaded = load(given.model)
    model: Any = loaded.model
    name = Path(loaded.source).name.removesuffix(".gguf")
    known = facts(model)
    law: Any = make_law("3d-rpe", context=max(known["pretrained"], given.length + 2 * TEXT), **known)
    draw = random.Random(0)
    excerpts = [prefix_and_probes(loaded.tokenizer, text, given.length, law.window, draw) for text in texts]
    origin = stamp(cuda=model.device.type == "cuda") | {"model": name, "length": str(given.length)}
    for path in (given.model, *map(str, given.text)):
        origin["recipe"] = origin["recipe"].replace(f" {path}", f" {Path(path).name}")
    study = Study(model, law)
    results: dict[str, list[dict[str, float]]] = {way: [] for way in chosen}
    rows: list[dict[str, Any]] = []
    for text, (prefix, probes) in zip(texts, excerpts, strict=True):
        study.read(prefix)
        for label, way in chosen.items():
            results[label].append(measure(study, probes, way))
        rows = [origin | row(label, mine, results[ALL.name]) for label, mine in results.items()]
        write(given.out / f"choosing-{name}.csv", rows)
        print(f"read {text.name}", file=sys.stderr, flush=True)
    show(rows)


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(f"error: {error.problem}\nhint: {error.hint}")
