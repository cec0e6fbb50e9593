"""benchmarks/choosing.py on a tiny model: its ways beside the law, that none looks ahead, and what it writes."""

from __future__ import annotations

import csv
import math
import random
import sys
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rpe3d import extend
from rpe3d.config import ConfigError
from rpe3d.geometry import make_law
from rpe3d.models import facts

SHIPS = "mean of 16 + aim 1.0 + lead 8 of 24 + first 128"
TOKENS = 200
PREFIX = 960  # 6 far chunks of 128, and another one from 1024 on
PROBES = (90, 40, 70)  # tokens; the first and the last go beyond 1024
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


class Words:
    """A tokenizer of words, whatever they are."""

    bos_token_id = None

    def __call__(self, text, **_):
        return SimpleNamespace(input_ids=[1 + sum(map(ord, word)) % (TOKENS - 1) for word in text.split()])


def tiny(pretrained, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": TOKENS, "max_position_embeddings": pretrained, **SIZES, **HEADS}
    return LlamaForCausalLM(LlamaConfig(**sizes | changes)).eval()


def drawn(seed, count):
    return random.Random(seed).choices(range(TOKENS), k=count)


@pytest.fixture
def choosing(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return import_module("choosing")


@pytest.fixture
def law():
    """Chunks of 128, which every block divides, and a choice of 256 of the far keys."""
    return make_law("3d-rpe", context=2048, chunk=128, window=128, reach=512, focus=2, fade=0.25, **facts(tiny(512)))


@pytest.fixture
def study(choosing, law):
    made = choosing.Study(tiny(512), law)
    made.watched = True
    made.read(drawn(1, PREFIX))
    return made


def probes():
    return [drawn(2 + i, count) for i, count in enumerate(PROBES)]


def nats(study, way, some=None):
    return torch.cat([each for each, _ in study.nats(some or probes(), way)])


def test_all_keys_faded_is_the_law_itself(choosing, law, study):
    """The oracle is the extended model, which reads the prefix and a probe in one forward."""
    model = extend(tiny(512), law)
    for probe, (each, hit) in zip(probes(), study.nats(probes(), choosing.ALL), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([drawn(1, PREFIX) + probe])).logits[0, PREFIX:-1]
        want = torch.nn.functional.cross_entropy(logits, torch.tensor(probe[1:]), reduction="none")
        torch.testing.assert_close(each, want, rtol=1e-4, atol=1e-4)
        assert torch.equal(hit, logits.argmax(-1) == torch.tensor(probe[1:]))


def test_the_way_that_ships_is_the_law_s_own_choice(choosing):
    """In a model of one layer, whose prefix is read alike whatever its queries choose."""
    own = {"chunk": 128, "window": 128, "reach": 512, "focus": 0, "fade": 0}
    dense = make_law("3d-rpe", context=2048, **own, **facts(tiny(512)))
    study = choosing.Study(tiny(512, num_hidden_layers=1), dense)
    study.read(drawn(1, PREFIX))
    model = extend(tiny(512, num_hidden_layers=1), "3d-rpe", context=2048, **own, far=16, block=16)
    for probe, (each, _) in zip(
        probes(), study.nats(probes(), choosing.WAYS["mean of 16 + aim 1.0 + lead 8 of 24 + first 128"]), strict=True
    ):
        with torch.no_grad():
            logits = model(torch.tensor([drawn(1, PREFIX) + probe])).logits[0, PREFIX:-1]
        want = torch.nn.functional.cross_entropy(logits, torch.tensor(probe[1:]), reduction="none")
        torch.testing.assert_close(each, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("all keys + faded", {"focus": 2, "fade": 0.25}),
        ("mean of 16 + aim 1.0 + lead 8 of 24 + first 128", {"far": 16}),
    ],
)
def test_a_prefix_read_under_a_way_is_read_as_the_law_reads_it(choosing, law, study, name, parameters):
    """In both layers, so what the prefix's own queries chose counts; the oracle is the extended model."""
    study.read(drawn(1, PREFIX), choosing.WAYS[name])
    model = extend(tiny(512), "3d-rpe", context=2048, chunk=128, window=128, reach=512, **parameters)
    for probe, (each, _) in zip(probes(), study.nats(probes(), choosing.WAYS[name]), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([drawn(1, PREFIX) + probe])).logits[0, PREFIX:-1]
        want = torch.nn.functional.cross_entropy(logits, torch.tensor(probe[1:]), reduction="none")
        torch.testing.assert_close(each, want, rtol=1e-4, atol=1e-4)


def test_a_way_with_a_full_layer_is_the_law_with_one(choosing):
    """Both read the prefix themselves; the oracle is the extended model."""
    own = {"chunk": 128, "window": 128, "reach": 512}
    study = choosing.Study(tiny(512), make_law("3d-rpe", context=2048, **own, **facts(tiny(512))))
    way = replace(choosing.by_layers(2)[-1], layers=(1,))
    study.read(drawn(1, PREFIX), way)
    model = extend(tiny(512), "3d-rpe", context=2048, **own, far=16, full=1)
    for probe, (each, _) in zip(probes(), study.nats(probes(), way), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([drawn(1, PREFIX) + probe])).logits[0, PREFIX:-1]
        want = torch.nn.functional.cross_entropy(logits, torch.tensor(probe[1:]), reduction="none")
        torch.testing.assert_close(each, want, rtol=1e-4, atol=1e-4)


def test_as_many_blocks_as_there_are_is_every_key(choosing, study):
    """Bit for bit, whatever the way: the choice is made, and leaves nothing out. In spans, heads vote for more keys.

    Not so where every key is seen once more.
    """
    every = {faded: nats(study, choosing.Way(faded=faded)) for faded in (False, True)}
    assert not torch.equal(every[False], every[True])
    for name, way in choosing.WAYS.items():
        if way.summary and way.rest != "all":
            most = replace(way, keys=1000.0, top=100 if way.summary == "spans" else way.top)
            assert torch.equal(nats(study, most), every[way.faded]), name


def test_ways_differ_from_every_key_and_from_each_other(choosing, study):
    """With fewer blocks than there are; a way without an effect would measure nothing."""
    some = {name: way for name, way in choosing.WAYS.items() if way.keys <= 1 and way.first in (0, 128)}
    del some["mean of 16 + keys x0.0625 + aim 1.0 + lead 8 of 24 + first 128"]  # one block here, as an eighth
    seen = {name: tuple(nats(study, way).tolist()) for name, way in some.items()}  # of 16 blocks 32 keys are the most
    assert len(set(seen.values())) == len(seen)


@pytest.mark.parametrize(
    "name",
    [
        "mean of 16 + agree 8",
        "sub4 of 32 + pool 4",
        "mean of 16 + witness cosine 10",
        "sub4 of 32 + witness z 2",
        "mean of 16 + aim 1.0 + lead 8 of 24",
        "mean of 16 + aim 1.0 + part 0.25 alone + lead 8 of 24",
        "nsa of 16 + first 128",
        "representatives of 128 + first 128",
        "spans of 32 + first 128",
        f"{SHIPS} + coarse 128",
        f"{SHIPS} + rest keys + rest faded x1",
        f"{SHIPS} + rest all + plus -1 + rest faded x1",
        f"{SHIPS} + rest mean",
        f"{SHIPS} + rest middle",
        f"{SHIPS} + rest odd",
    ],
)
def test_no_token_depends_on_a_later_one(choosing, study, name):
    """Also not on another probe: with one replaced from token 30 on, all nats before and beside it are the same."""
    way = choosing.WAYS[name]
    before = [each for each, _ in study.nats(probes(), way)]
    changed = probes()
    changed[1][30:] = drawn(9, PROBES[1] - 30)
    after = [each for each, _ in study.nats(changed, way)]
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1][:29], after[1][:29])
    assert torch.equal(before[2], after[2])
    assert not torch.equal(before[1][30:], after[1][30:])


class Slow:
    """Published ways, written apart: query by query in float64, rotations as complex numbers, sets of keys.

    Made of the queries that read the prefix, and of queries, keys and values of the probes (scaled, rotated by RoPE).
    The law has chunks and windows of 128 and blocks of 256 far keys.
    """

    def __init__(self, study, prefix, q, k, v):
        self.law, self.start = study.law, study.start
        self.theta = study.law.frequencies()
        self.position, self.probe = (study.start + study.within).tolist(), study.probe.tolist()
        self.place = [*range(self.start), *self.position]
        self.prefix, self.q, self.k, self.v = self.plain(prefix, range(self.start)), self.plain(q), self.plain(k), v

    def plain(self, x, places=None):
        """Return vectors [heads, tokens, pairs] without positions."""
        x = x.double().reshape(-1, *x.shape[-2:])
        first, second = x.chunk(2, -1)
        return self.turned(torch.complex(first, second), [-p for p in places or self.place[-x.shape[1] :]])

    def turned(self, x, places):
        return x * torch.exp(1j * torch.tensor(places, dtype=torch.float64)[:, None] * self.theta)

    def scores(self, q, at, keys, places):
        """Return q · k of one query at a position and keys at theirs."""
        return (self.turned(q[None], [at]) * self.turned(keys, places).conj()).sum(-1).real

    def edge(self, position):
        return max(0, position // 128 - 1) * 128

    def near(self, head, i):
        """Return the near keys of token i of the probes and its scores of them."""
        p = self.position[i]
        mine = [*range(self.edge(p), self.start)]
        mine += [self.start + j for j in range(i + 1) if self.probe[j] == self.probe[i] and self.position[j] <= p]
        assert all(self.edge(p) <= self.place[j] for j in mine)
        return mine, self.scores(self.q[head, i], p, self.k[head // 2, mine], [self.place[j] for j in mine])

    def far(self, q, head, p):
        """Return the scores of all far keys of a query at position p, under bounded positions."""
        region, keys = self.law.regions[-1], torch.arange(self.edge(p))
        at = float(region.query.position(torch.tensor(p)))
        return self.scores(q, at, self.k[head // 2, : len(keys)], region.key.position(keys).tolist())

    def best(self, score, size):
        """Return the keys of the first blocks and of the best ones: 256 keys."""
        most = 256 // size
        always = [*range(max(1, min(128 // size, most // 8)))]
        order = sorted(range(len(always), len(score)), key=lambda block: -float(score[block]))
        chosen = always + order[: most - len(always)]
        return {key for block in chosen for key in range(block * size, (block + 1) * size)}

    def bounds(self, i, size):
        """Quest: the least and the most of each component of a page's keys; of a key head the most certain head."""
        p, chosen = self.position[i], []
        region, keys = self.law.regions[-1], torch.arange(self.edge(self.position[i]))
        for key_head in range(2):
            shares = []
            for head in (2 * key_head, 2 * key_head + 1):
                q = self.turned(self.q[head, i][None], [float(region.query.position(torch.tensor(p)))])[0]
                k = self.turned(self.k[key_head, : len(keys)], region.key.position(keys).tolist())
                q, k = torch.cat([q.real, q.imag]), torch.cat([k.real, k.imag], -1)
                pages = [torch.maximum(q * page.amin(0), q * page.amax(0)).sum() for page in k.split(size)]
                shares.append(torch.stack(pages).softmax(0))
            chosen.append(self.best(torch.maximum(*shares), size))
        return chosen

    def nsa(self, i, size):
        """Softmax over the mean scores of all complete blocks, far and near; its sum over the heads of a key head."""
        p, chosen = self.position[i], []
        for key_head in range(2):
            importance = 0
            for head in (2 * key_head, 2 * key_head + 1):
                far = self.far(self.q[head, i], head, p).reshape(-1, size).mean(1)
                near = self.near(head, i)[1]
                whole = near[: len(near) // size * size].reshape(-1, size).mean(1)
                importance = importance + torch.cat([far, whole]).softmax(0)[: len(far)]
            chosen.append(self.best(importance, size))
        return chosen

    def representatives(self, i, size, count=4):
        """InfLLM: the keys of a block that got the most attention while they were near; one choice for all heads."""
        p, total = self.position[i], 0
        for head in range(4):
            got = self.received(head)
            q = self.turned(self.q[head, i][None], [128])[0]
            score = []
            for block in range(self.edge(p) // size):
                keys = sorted(range(block * size, (block + 1) * size), key=lambda key: -float(got[key]))[:count]
                score.append((q * self.k[head // 2, keys].conj()).real.sum())
            total = total + torch.stack(score)
        return [self.best(total, size)] * 2

    @cache  # noqa: B019
    def received(self, head):
        """Return the mean weight of each key in the rows of the queries that have it in their window."""
        got, times = torch.zeros(self.start), torch.zeros(self.start)
        for p in range(self.start):
            first = self.edge(p)
            near = self.scores(self.prefix[head, p], p, self.k[head // 2, first : p + 1], range(first, p + 1))
            weight = torch.cat([near, self.far(self.prefix[head, p], head, p)]).softmax(0)
            got[first : p + 1] += weight[: len(near)]
            times[first : p + 1] += 1
        return got / times

    def spans(self, i, size, ahead=False):
        """ReAttention: spans around the keys that most heads of the probe's queries have among their best four."""
        votes = Counter()
        for j in range(len(self.position)):
            if self.probe[j] == self.probe[i] and (ahead or j <= i):
                for head in range(4):
                    last = self.edge(self.position[j])
                    score = self.scores(self.q[head, j], 0, self.k[head // 2, size:last], [0] * (last - size))
                    votes.update((score.topk(4).indices + size).tolist())
        edge = self.edge(self.position[i])
        most = sorted((key for key in votes if key < edge), key=lambda key: (votes[key], key))[-(256 // size - 1) :]
        around = {key for centre in most for key in range(centre - size // 2, centre + size // 2)}
        return [({*range(size)} | around) & {*range(edge)}] * 2

    def attend(self, i, far_keys, rest=None):
        """Return the output of every head for token i, with these far keys of each key head, and a rest of others."""
        out = []
        for head in range(4):
            keys, near = self.near(head, i)
            chosen = sorted(far_keys[head // 2])
            far = self.far(self.q[head, i], head, self.position[i])[chosen]
            values = self.v[head // 2, keys + chosen].double()
            if rest:
                more, more_values = rest(head, i, [j for j in range(self.edge(self.position[i])) if j not in chosen])
                far, values = torch.cat([far, more]), torch.cat([values, more_values])
            out.append(torch.cat([near, far]).softmax(0) @ values)
        return torch.stack(out)

    def faded(self, score, p, focus, rate):
        """Return the logarithms of the weights whose sum is (Σ e^{τ s})^{1/τ} (512 / p)^rate, shared as e^{τ s}."""
        tau = (math.log(p) / math.log(512)) ** focus
        return (tau * score).log_softmax(0) + (tau * score).logsumexp(0) / tau + rate * math.log(512 / p)

    def every(self, head, i, left, focus=0.0, rate=0.0):
        """Each key that is left, faded."""
        score = self.far(self.q[head, i], head, self.position[i])[left]
        return self.faded(score, self.position[i], focus, rate), self.v[head // 2, left].double()

    def one(self, head, i, left, stands_for, focus=0.0, rate=0.0):
        """One score and one value for each block of 16 that is left, with the weight of 16."""
        blocks = [left[j : j + 16] for j in range(0, len(left), 16)]
        assert all(block == [*range(block[0], block[0] + 16)] and block[0] % 16 == 0 for block in blocks)
        both = [stands_for(head, i, block) for block in blocks]
        score = torch.stack([score for score, _ in both])
        # (16 Σ e^{τ s})^{1/τ}
        weight = self.faded(score, self.position[i], focus, rate)
        log_16 = math.log(16) / (math.log(self.position[i]) / math.log(512)) ** focus
        return weight + log_16, torch.stack([value for _, value in both])

    def by_mean(self, head, i, block):
        score = self.far(self.q[head, i], head, self.position[i])[block].mean()
        return score, self.v[head // 2, block].double().mean(0)

    def by_middle(self, head, i, block):
        p, region = self.position[i], self.law.regions[-1]
        places = region.key.position(torch.tensor(block)).mean().item()
        at = float(region.query.position(torch.tensor(p)))
        mean = self.k[head // 2, block].mean(0, keepdim=True)
        return self.scores(self.q[head, i], at, mean, [places])[0], self.v[head // 2, block].double().mean(0)

    def by_odd(self, head, i, block):
        keys = self.k[head // 2, block]
        away = [(key - keys.mean(0)).abs().square().sum() for key in keys]
        best = block[away.index(max(away))]
        return self.far(self.q[head, i], head, self.position[i])[best], self.v[head // 2, best].double()


def spied(method, calls):
    """Return the method, which also notes what it was given and what it returned."""

    def call(*arguments):
        calls.append((arguments, method(*arguments)))
        return calls[-1][1]

    return call


@pytest.mark.parametrize(
    ("name", "choose"),
    [
        ("bounds of 16 + first 128", lambda slow, i: slow.bounds(i, 16)),
        ("nsa of 16 + first 128", lambda slow, i: slow.nsa(i, 16)),
        ("representatives of 128 + first 128", lambda slow, i: slow.representatives(i, 128)),
        ("representatives of 16 + first 128", lambda slow, i: slow.representatives(i, 16)),
        ("spans of 32 + first 128", lambda slow, i: slow.spans(i, 32)),
        ("spans of 32 + ahead + first 128", lambda slow, i: slow.spans(i, 32, ahead=True)),
    ],
)
def test_a_published_way_attends_to_what_its_formula_chooses(choosing, monkeypatch, name, choose):
    """Quest, NSA, InfLLM and ReAttention against `Slow`, in the second layer: in the first, equal tokens tie."""
    law = make_law("3d-rpe", context=2048, chunk=128, window=128, reach=512, focus=0, fade=0, **facts(tiny(512)))
    study = choosing.Study(tiny(512), law)
    study.watched, given = True, []
    monkeypatch.setattr(study, "watch", spied(study.watch, given))
    monkeypatch.setattr(study, "look", spied(study.look, given))
    study.read(drawn(1, PREFIX))
    study.nats(probes(), choosing.WAYS[name])
    _, ((_, prefix, *_), _), _, ((_, q, k, v, _), (out, _)) = given
    slow = Slow(study, prefix, q, k, v)
    for i in (0, 17, 64, 95, 130, 199):  # of three probes; 64 and 194 are the first beyond 1024
        want = slow.attend(i, choose(slow, i))
        torch.testing.assert_close(out.flatten(0, 1)[:, i].double(), want, rtol=1e-4, atol=1e-5)


RESTS = {
    "all": lambda slow, **fade: (
        lambda head, i, left: slow.every(head, i, [*range(slow.edge(slow.position[i]))], **fade)
    ),
    "keys": lambda slow, **fade: partial(slow.every, **fade),
    "mean": lambda slow, **fade: partial(slow.one, stands_for=slow.by_mean, **fade),
    "middle": lambda slow, **fade: partial(slow.one, stands_for=slow.by_middle, **fade),
    "odd": lambda slow, **fade: partial(slow.one, stands_for=slow.by_odd, **fade),
}


@pytest.mark.parametrize("sharp", [None, 1.0, 2.0])
@pytest.mark.parametrize("rest", RESTS)
def test_the_rest_is_seen_as_its_formula_has_it(choosing, monkeypatch, law, rest, sharp):
    """Beside near keys and the blocks that were chosen, whatever these are; the oracle is `Slow`, query by query."""
    study = choosing.Study(tiny(512), law)
    study.watched, watched, looked, chosen = True, [], [], []
    monkeypatch.setattr(study, "watch", spied(study.watch, watched))
    study.read(drawn(1, PREFIX))
    monkeypatch.setattr(study, "look", spied(study.look, looked))
    monkeypatch.setattr(study, "first_and_best", spied(study.first_and_best, chosen))
    study.nats(probes(), replace(choosing.SHIPS, rest=rest, plus=-0.7, sharp=sharp))
    (_, prefix, *_), _ = watched[-1]
    ((_, q, k, v, _), (out, _)), (_, best) = looked[-1], chosen[-1]
    slow = Slow(study, prefix, q, k, v)
    fade = {} if sharp is None else {"focus": 2 * sharp, "rate": 0.25}
    for i in (0, 64, 95, 199):
        keys = [{key for key in range(slow.edge(slow.position[i])) if mine[i, key // 16]} for mine in best]
        assert all(len(some) == 256 for some in keys)

        def plus(*arguments):
            score, values = RESTS[rest](slow, **fade)(*arguments)
            return score - 0.7, values

        want = slow.attend(i, keys, plus)
        torch.testing.assert_close(out.flatten(0, 1)[:, i].double(), want, rtol=1e-4, atol=1e-5)


def test_coarse_blocks_are_chosen_beside_the_small_ones(choosing, monkeypatch, law):
    """By the same rule with blocks of 128 keys; the oracle sees the union of the two choices that were made."""
    study = choosing.Study(tiny(512), law)
    study.watched, watched, looked, chosen = True, [], [], []
    monkeypatch.setattr(study, "watch", spied(study.watch, watched))
    study.read(drawn(1, PREFIX))
    monkeypatch.setattr(study, "look", spied(study.look, looked))
    monkeypatch.setattr(study, "first_and_best", spied(study.first_and_best, chosen))
    study.nats(probes(), choosing.WAYS[f"{SHIPS} + coarse 128"])
    (_, prefix, *_), _ = watched[-1]
    ((_, q, k, v, _), (out, _)), (_, small), (_, large) = looked[-1], *chosen[-2:]
    assert (large.sum(-1) == 2).all()
    slow = Slow(study, prefix, q, k, v)
    for i in (0, 95, 199):
        far = range(slow.edge(slow.position[i]))
        keys = [{key for key in far if a[i, key // 16] or b[i, key // 128]} for a, b in zip(small, large, strict=True)]
        want = slow.attend(i, keys)
        torch.testing.assert_close(out.flatten(0, 1)[:, i].double(), want, rtol=1e-4, atol=1e-5)


def test_spans_that_count_later_queries_leak(choosing, study):
    """What ReAttention does while it reads: with the end of a probe replaced, its first tokens are read differently."""
    way = choosing.WAYS["spans of 32 + ahead + first 128"]
    changed = probes()
    changed[1][30:] = drawn(9, PROBES[1] - 30)
    before, after = (study.nats(some, way)[1][0][:29] for some in (probes(), changed))
    assert not torch.equal(before, after)


def test_published_ways_may_see_as_many_keys_as_the_one_that_ships(choosing):
    """2048 of SmolLM2's far keys, the first 128 among them; a key that is seen moves the output."""
    law = make_law("3d-rpe", context=16384, **facts(tiny(8192)))
    made = choosing.Study(tiny(8192), law)
    for way in (choosing.SHIPS, *choosing.PUBLISHED):
        most, always = made.most_and_always(way, 1.0)
        assert (most * way.block, always * way.block) == (2048, 128), way.name


@pytest.fixture
def bench(choosing, monkeypatch, tmp_path):
    """Runs the benchmark on two texts in one folder; returns its rows."""

    def load(name, dtype):
        return SimpleNamespace(model=tiny(2048), tokenizer=Words(), source="tiny")

    monkeypatch.setattr(choosing, "load", load)
    texts = [tmp_path / f"{name}.txt" for name in "ab"]
    for seed, path in enumerate(texts):
        path.write_text(" ".join(map(str, drawn(seed, 3000))))

    def run(*options, texts=tuple(texts)):
        read = [word for path in texts or () for word in ("--text", path)]
        given = ["--model", "tiny", *read, "--out", tmp_path / "out", *options]
        monkeypatch.setattr(sys, "argv", ["choosing.py", *map(str, given)])
        choosing.main()
        with (tmp_path / "out" / "choosing-tiny.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    return run


def test_rows_stand_beside_the_law_and_add_up(bench, tmp_path, capsys):
    rows = bench("--length", "2k", "--only", "mean of 16")
    assert [row["way"] for row in rows] == ["all keys + faded", "mean of 16"]
    assert {(row["model"], row["length"], row["texts"], row["needles"]) for row in rows} == {("tiny", "2048", "2", "8")}
    assert {rows[0][f"{kind}_diff"] for kind in ("text", "copy", "needle")} == {"0.0"}
    law, mine = (float(row["text_nats"]) for row in rows)
    assert float(rows[1]["text_diff"]) == pytest.approx(mine - law, abs=2e-4)
    assert float(rows[1]["text_se"]) > 0
    assert str(tmp_path) not in rows[0]["recipe"]
    assert "mean of 16" in capsys.readouterr().out
    more = bench("--length", "2k", "--only", "bounds of 32")
    assert [row["way"] for row in more] == ["mean of 16", "all keys + faded", "bounds of 32"]
    assert more[0] == rows[1]


def test_full_layers_are_tried_three_at_a_time(bench, choosing):
    rows = bench("--length", "2k", "--only", "layers")
    assert [row["way"] for row in rows[3:]] == [
        SHIPS,
        f"{SHIPS} + in layers 0-1: {SHIPS} + rest all + plus -1 + rest faded x1",
    ]
    assert [way.layers for way in choosing.by_layers(7)[3:]] == [(0, 1, 2), (3, 4, 5), (6,)]
    with pytest.raises(ConfigError, match="the model has 2 layers, so none has the number 18: try --only layers"):
        bench("--length", "2k", "--only", "full")


def test_a_passkey_is_the_prompt_of_a_comparison(choosing):
    from rpe3d.evaluate.tasks.retrieval import make_passkey

    trial = make_passkey(Words(), 700, 0.3, 5)
    prefix, [probe] = choosing.passkey_and_probe(Words(), 700, 0.3, 5)
    assert prefix + probe.ids == [*trial.prompt.tolist(), *trial.answer]
    assert probe.ids[probe.skip :] == trial.answer


def test_passkeys_are_counted_beside_texts_or_alone(bench):
    row = bench("--length", "2k", "--passkeys", "3", "--only", "mean of 16")[1]
    assert (row["texts"], row["passkeys_n"], row["prefix"]) == ("2", "3", "all keys + faded")
    assert float(row["passkey_se"]) > 0
    assert 0 <= int(row["passkeys"]) <= int(row["passkeys_told"]) <= 3
    through = bench("--length", "2k", "--passkeys", "3", "--only", "mean of 16", "--through")
    assert [one["prefix"] for one in through] == ["all keys + faded"] * 2 + ["each way"] * 2
    assert through[2]["passkey_nats"] == through[0]["passkey_nats"]
    assert through[3]["passkey_nats"] != through[1]["passkey_nats"]
    assert bench("--length", "2k", "--passkeys", "2", "--only", "all keys", texts=False)[-1]["text_nats"] == ""


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--length", "2k", "--only", "mean of 17"), "did you mean 'mean of 16'"),
        (("--length", "8k"), "a.txt has 3000 tokens"),
        (("--length", "512"), "no key of 512 tokens is far"),
    ],
)
def test_what_cannot_be_measured_is_refused(bench, options, problem):
    with pytest.raises(ConfigError, match=problem):
        bench(*options)


def test_nothing_to_read_is_refused(bench):
    with pytest.raises(ConfigError, match="nothing to read"):
        bench("--length", "2k", texts=False)


def test_the_same_command_resumes_and_shows_differences_to_the_way_that_ships(bench, choosing, monkeypatch, capsys):
    options = ("--length", "2k", "--passkeys", "1", "--only", "published")
    first = bench(*options)
    shown = capsys.readouterr().out
    assert f"less {choosing.SHIPS.name}, with 95 % intervals" in shown
    assert {row["way"] for row in first} == {way.name for way in (choosing.ALL, choosing.SHIPS, *choosing.PUBLISHED)}
    monkeypatch.setattr(choosing, "measure", None)  # nothing is measured again
    assert bench(*options) == first
    assert capsys.readouterr().out == shown


def test_differences_are_paired_and_have_student_s_interval(choosing):
    """By hand: 0.1, 0.2, 0.6 have mean 0.3 and deviation 0.2646; t of two degrees of freedom is 4.3027."""
    base = [{"text": 1.0, "passkeys": 0}, {"text": 3.0, "passkeys": 0}, {"text": 2.0, "passkeys": 0}]
    mine = [{"text": 1.1, "passkeys": 0}, {"text": 3.2, "passkeys": 0}, {"text": 2.6, "passkeys": 0}]
    found = choosing.differences(mine, base)
    assert set(found) == {"text"}
    assert (found["text"].mean, found["text"].high) == pytest.approx((0.3, 0.3 + 4.3027 * 0.2646 / 3**0.5), abs=1e-3)


def test_key_tokens_need_the_far_text(choosing):
    """By hand, LongPPL's rule with the lower of two losses: more than 2 nats better than near keys, and below 2."""
    near = torch.tensor([5.0, 5.0, 5.0, 3.0, 1.0])
    full = [torch.tensor([1.0, 4.0, 2.5, 1.5, 0.5]), torch.tensor([4.0, 1.5, 2.1, 1.2, 0.1])]
    keys = choosing.key_tokens(near, full)
    assert keys.tolist() == [True, True, False, False, False]
    probe = choosing.Probe(kind="text", ids=[0] * 6)
    answers = [(torch.tensor([1.0, 4.0, 2.0, 2.0, 2.0]), torch.zeros(5, dtype=torch.bool))]
    found = choosing.measure([probe], answers, keys)
    assert (found["text"], found["far"], found["far_n"]) == pytest.approx((2.2, 2.5, 2))
    assert "far" not in choosing.measure([probe], answers, torch.zeros(5, dtype=torch.bool))


def test_texts_with_more_key_tokens_count_more(choosing):
    """By hand: 0.1 of 3 tokens, 0.5 of 1 and none; the mean is 0.2, its spread that of 0.2 + 2 n (d - 0.2) / 4."""
    base = [{"text": 1.0, "far": 1.0, "far_n": 3, "passkeys": 0, "found": 0, "told": 0}]
    base += [
        base[0] | {"far_n": 1},
        {name: base[0][name] for name in ("text", "passkeys", "found", "told")} | {"far_n": 0},
    ]
    mine = [base[0] | {"far": 1.1}, base[1] | {"far": 1.5}, base[2]]
    made = choosing.row("mine", mine, base)
    assert (made["far_nats"], made["far_diff"], made["far_n"]) == (1.2, 0.2, 4)
    assert made["far_se"] == pytest.approx(0.15, abs=1e-3)  # 0.05 and 0.35
    assert choosing.differences(mine, base)["far"].mean == pytest.approx(0.2)


def test_all_ways_of_a_run_have_the_same_key_tokens(bench, choosing, monkeypatch):
    """Those of near keys against the lower loss of two ways; a model of noise finds none by the rule, so by another."""
    monkeypatch.setattr(choosing, "is_key", lambda full, short: short > full + 0.2)
    calls, nats = {}, choosing.Study.nats

    def noted(study, some, way):
        calls.setdefault(way.name, []).append(nats(study, some, way))
        return calls[way.name][-1]

    monkeypatch.setattr(choosing.Study, "nats", noted)
    rows = bench("--length", "2k", "--only", "rests", "--text-tokens", "600")
    near, every, faded = (calls[name] for name in ("first of 16", "all keys", "all keys + faded"))
    assert all(len(made) == 2 for made in calls.values())  # each way once on each of two texts
    keys = [a[0][0] > torch.minimum(b[0][0], c[0][0]) + 0.2 for a, b, c in zip(near, every, faded, strict=True)]
    assert all(len(some) == 599 and 0 < some.sum() < 599 for some in keys)
    assert {row["far_n"] for row in rows} == {str(int(sum(some.sum() for some in keys)))}
    for row in rows:
        losses = torch.cat([made[0][0][some] for made, some in zip(calls[row["way"]], keys, strict=True)])
        assert float(row["far_nats"]) == pytest.approx(float(losses.mean()), abs=1e-4)
    assert bench("--length", "2k", "--only", "mean of 16")[-1]["far_nats"] == ""
