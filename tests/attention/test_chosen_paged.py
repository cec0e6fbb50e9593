"""The decoding step of a chosen far field over pages, and what is kept of them, held to the specification."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rpe3d import ConfigError
from rpe3d.attention.chooser import Chooser
from rpe3d.testing import assert_as_good, in_float64, random_problem, small_law

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.usefixtures("poisoned")

OWN = {"pretrained": 256, "context": 4096, "chunk": 32, "window": 64, "reach": 160, "focus": 0, "fade": 0, "sinks": 0}
LONGEST = 512


def law_for(far=5, **changes):
    """Return a law with chunks of 32 and a window of 64: from token 97 on a query has something to choose."""
    return small_law("3d-rpe", **OWN | {"head_dim": 32, "block": 16, "far": far} | changes)


class Text:
    """A sequence: its vectors at all positions, how many of them are cached, and its pages."""

    def __init__(self, server, shares=None, upto=0):
        law, device = server.law, server.device
        self.x = random_problem(law, device, h=server.heads, g=server.groups, t=1, s=LONGEST, dtype=server.dtype)
        self.length, self.pages = 0, []
        if shares is not None:  # the first tokens of another text, page by page, as a prefix cache gives them
            assert upto % server.page == 0
            for mine, theirs in ((self.x.k, shares.x.k), (self.x.v, shares.x.v)):
                mine[:, :, :upto] = theirs[:, :, :upto]
            self.length, self.pages = upto, shares.pages[: upto // server.page]


class Server:
    """Pages that nobody filled hold NaN, and so does what is kept of them; a page is given to who asks for one."""

    def __init__(self, law, device, *, page=16, heads=4, groups=2, dtype=torch.float32, pages=80, apart=True, **more):
        from rpe3d.attention.chosen import paged

        self.law, self.device, self.page, self.heads, self.groups, self.dtype = law, device, page, heads, groups, dtype
        dim = law.rotary.head_dim
        self.steps = paged.Steps(
            law, device, sequences=16, heads=heads, groups=groups, longest=LONGEST, page=page, **more
        )
        layout = self.steps.layout
        each = groups * page * 2 * dim * dtype.itemsize
        room = layout.padded(each, groups, dim)
        whole = torch.full((pages, room // dtype.itemsize), torch.nan, dtype=dtype, device=device)
        cache = whole[:, : each // dtype.itemsize].unflatten(1, (page, groups, 2 * dim))
        self.k, self.v = cache.split(dim, dim=-1)
        self.kept = layout.empty(pages, groups, dim, device) if apart else layout.behind(cache, each, groups, dim)
        for x in self.kept:
            x.fill_(torch.nan)
        self.free = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).tolist()

    def table(self, texts, beyond=2**30):
        width = LONGEST // self.page + 3
        rows = [text.pages + [beyond] * (width - len(text.pages)) for text in texts]
        return torch.tensor(rows, dtype=torch.int32, device=self.device)

    def write(self, counts, summarize=True, hidden=()):
        """Cache the next tokens of texts in one forward; those of `hidden` texts have no slots."""
        slots = []
        for text, count in counts.items():
            for p in range(text.length, text.length + count):
                if p % self.page == 0:
                    text.pages.append(self.free.pop(0))
                page, cell = text.pages[p // self.page], p % self.page
                slots.append(-1 if text in hidden else page * self.page + cell)
                self.k[page, cell], self.v[page, cell] = text.x.k[0, :, p], text.x.v[0, :, p]
            text.length += count
        if summarize:
            self.summarize(counts, slots)

    def summarize(self, counts, slots):
        numbers = [0, *counts.values(), 0]
        lengths = [text.length for text in counts] + [0]  # a row that is not in use
        self.steps.summarize(
            self.k,
            self.kept,
            pages=torch.cat([self.table(list(counts)), self.table([]).new_full((1, LONGEST // self.page + 3), 2**30)]),
            starts=torch.tensor(numbers, device=self.device).cumsum(0).int(),
            lengths=torch.tensor(lengths, dtype=torch.int32, device=self.device),
            slots=torch.tensor(slots, device=self.device),
            most=max(counts.values()),
        )

    def leave(self, text):
        """End a text: its pages are the next to be given away."""
        self.free = text.pages + self.free
        text.pages = []

    def check(self, *texts, sinks=None):
        """Step from the last token of every text, and judge each by itself; None is a row that is not in use."""
        lengths = [0 if text is None else text.length for text in texts]
        q = torch.cat([torch.randn_like(texts[0].x.q) for _ in texts])
        out = torch.full((len(texts), 1, self.heads, q.shape[3]), torch.nan, dtype=self.dtype, device=self.device)
        out = out.transpose(1, 2)
        empty = torch.full((LONGEST // self.page + 3,), 2**30, dtype=torch.int32, device=self.device)
        table = torch.stack([empty if text is None else self.table([text])[0] for text in texts])
        seen = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        given = {"pages": table, "lengths": seen, "scale": 0.2, "sinks": sinks}
        lse = self.steps(q, self.k, self.v, out, self.kept, **given).clone()
        for i, (text, n) in enumerate(zip(texts, lengths, strict=True)):
            one = slice(i, i + 1)
            if text is None:
                assert (out[one] == 0).all()
                assert (lse[one] == -torch.inf).all()
                continue
            k, v = text.x.k[:, :, :n], text.x.v[:, :, :n]
            problem = replace(
                text.x, q=q[one], k=k, v=v, queries=range(n - 1, n), keys=range(n), scale=0.2, sinks=sinks
            )
            assert_as_good(problem, out[one], lse[one])
            self.check_kept(text, problem)
        assert (self.steps.arrivals == 0).all()

    def check_kept(self, text, problem):
        """Hold the summaries that a query may choose by to the specification: outputs show few of them."""
        can = self.steps.selection.choosable(text.length - 1)
        if can:
            truth = Chooser(in_float64(problem), self.law.regions[-1]).summaries[0, :, :can]
            layout = self.steps.layout
            places = range(layout.first // layout.size, layout.first // layout.size + can)
            pages = [(text.pages[place // layout.blocks], place % layout.blocks) for place in places]
            found = torch.stack([self.kept.summaries[page, block] for page, block in pages], 1)
            torch.testing.assert_close(found.double(), truth, rtol=0, atol=2**-8)


LENGTHS = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 111, 112, 113, 127, 128, 129, 160, 161, 400]
"""On both sides of the edges of blocks, chunks and of the window, and beyond."""


@pytest.mark.parametrize(("page", "splits"), [(16, 3), (64, 1)])
def test_sequences_of_all_lengths_share_a_step(page, splits, device):
    server = Server(law_for(), device, page=page, splits=splits, pages=200, heads=2, groups=1)
    server.steps.room.fill_(255)  # what is not written is not a number
    for some in (LENGTHS[:11], LENGTHS[11:]):
        texts = {Text(server): n for n in some}
        server.write(texts)
        server.check(*texts, None)
        for text in texts:
            server.leave(text)


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"head_dim": 64}, {"heads": 6, "groups": 1}),
        ({"head_dim": 128}, {"heads": 2, "groups": 2, "page": 32}),
        ({"rotary_dim": 20}, {}),
        ({"interleaved": True}, {}),
        ({"block": 4, "decay": 0.7}, {}),
        ({"block": 8, "far": 17, "first": 64}, {"page": 48}),
        ({"chunk": 96, "window": 96, "reach": 256}, {}),
        ({"block": 32}, {"page": 32}),
        ({}, {"dtype": torch.bfloat16}),
        ({}, {"dtype": torch.float16, "apart": False}),
    ],
)
def test_laws_heads_blocks_pages_and_types(changes, options, device):
    server = Server(law_for(**changes), device, **options)
    text, other = Text(server), Text(server)
    server.write({text: 300, other: 170})
    server.check(other, text)


def test_sinks_of_the_model_take_their_share(device):
    server = Server(law_for(), device)
    text = Text(server)
    server.write({text: 200})
    server.check(text, sinks=torch.randn(4, device=device))


@pytest.mark.parametrize("piece", [7, 50])
def test_a_text_may_come_in_pieces(piece, device):
    """Blocks, and the pages that hold the mean of the first keys, are cut anywhere; then one token after another."""
    server = Server(law_for(), device)
    text, beside = Text(server), Text(server)
    server.write({beside: 40})
    while text.length < 180:
        server.write({text: min(piece, 180 - text.length), beside: 1})
    server.check(text, beside)
    for _ in range(18):
        server.write({text: 1, beside: 1})
    server.check(text, beside)


def test_pages_that_were_another_texts_are_summarized_anew(device):
    """With what the first left behind, the second would be wrong: the last line shows that the test can tell."""
    server = Server(law_for(), device, pages=30)
    first, second, third = (Text(server) for _ in range(3))
    server.write({first: 300})
    server.check(first)
    server.leave(first)
    server.write({second: 120})
    server.write({second: 160})
    server.check(second)
    server.leave(second)
    server.write({third: 280}, summarize=False)
    with pytest.raises(AssertionError):
        server.check(third)


LONG = {"chunk": 96, "window": 96, "reach": 256}


@pytest.mark.parametrize(("changes", "upto"), [({}, 16), ({}, 48), ({}, 112), (LONG, 48), (LONG, 96), (LONG, 144)])
def test_texts_that_begin_alike_share_pages(changes, upto, device):
    """Within the first keys (32 or 96), within the pages that hold their mean, and beyond.

    Texts that share a part of the first keys have other means, and so other summaries of the blocks that they share.
    Two are written before either is checked, and a third after both.
    """
    server = Server(law_for(**changes), device, heads=2, groups=1)
    one = Text(server)
    server.write({one: upto})
    two = Text(server, one, upto)
    three = Text(server, one, upto)
    server.write({two: 280 - upto})
    server.write({one: 330 - upto})
    server.check(one, two)
    server.write({three: 40, one: 1, two: 1})
    server.write({three: 300 - upto})
    server.check(three, two, one)


@pytest.mark.parametrize(
    ("length", "upto", "order"),
    [(208, 16, 0), (208, 64, 1), (208, 96, 0), (208, 96, 1), (208, 112, 1), (208, 160, 1), (96, 96, 0), (96, 96, 1)],
)
def test_a_text_may_begin_with_pages_that_are_written_in_the_same_forward(length, upto, order, device):
    """vLLM's prefix cache knows a page as soon as it is given away, and so may give it to the next text at once.

    The mean of the first keys is kept in pages up to token 96: a text may end there, and the other go on.
    """
    server = Server(law_for(), device, heads=2, groups=1)
    one = Text(server)
    server.write({one: length}, summarize=False)
    two = Text(server, one, upto)
    server.write({two: 230 - upto}, summarize=False)
    texts = {one: length, two: 230 - upto}
    if order:
        texts = dict(reversed(texts.items()))
    slots = [
        text.pages[p // 16] * 16 + p % 16 for text, n in texts.items() for p in range(text.length - n, text.length)
    ]
    server.summarize(texts, slots)
    server.check(one, two)


def test_what_was_not_written_is_not_summarized(device):
    """A server rehearses with rows that look like sequences, whose keys are written nowhere: their slots are -1.

    Nor is it where a slot is not that of the position: a server may send a rehearsal's keys to a page of nobody's.
    """
    server = Server(law_for(), device)
    text = Text(server)
    server.write({text: 200})
    kept = [x.clone() for x in server.kept]
    text.pages = text.pages[3:] + text.pages[:3]
    for slots in ([-1] * 200, [0] * 200):
        server.summarize({text: 200}, slots)
        for x, y in zip(server.kept, kept, strict=True):
            assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))


@pytest.mark.parametrize("name", ["summaries", "centres"])
def test_what_is_kept_is_used(name, device):
    server = Server(law_for(), device)
    text = Text(server)
    server.write({text: 400})
    getattr(server.kept, name).normal_()
    with pytest.raises(AssertionError):
        server.check(text)


def test_no_summary_is_kept_in_a_page_that_does_not_determine_it(device):
    """Pages among the first keys, of which texts that differ later may share some, hold nothing."""
    server = Server(law_for(), device)
    text = Text(server)
    server.write({text: 300})
    held = [not server.kept.summaries[page].isnan().any() for page in text.pages]
    assert held == [False] * 2 + [True] * 16 + [False]
    means = [not server.kept.centres[page].isnan().any() for page in text.pages]
    assert means == [False] * 2 + [True] * 4 + [False] * 13


def test_a_captured_step_serves_other_lengths(device):
    """What a CUDA graph repeats must not depend on lengths: a batch of one shape is bound once."""
    server = Server(law_for(), device)
    texts = [Text(server) for _ in range(3)]
    server.write(dict(zip(texts, (200, 3, 97), strict=True)))
    server.check(*texts)
    (launch,) = server.steps._steps.items()
    server.write(dict(zip(texts, (1, 100, 33), strict=True)))
    server.check(texts[2], None, texts[1])
    assert list(server.steps._steps.items()) == [launch]


def test_laws_and_pages_that_are_refused(device):
    from rpe3d.attention.chosen.paged import Steps, refusal

    assert refusal(law_for(), 16, 32) is None
    assert refusal(law_for(), 24, 32) == "pages of 24 tokens are not whole blocks of 16 keys"
    assert refusal(law_for(), 128, 32) == "pages of 128 tokens are longer than what a query sees without a choice"
    assert refusal(small_law("3d-rpe"), 16, 32) == "no query has a choice of keys"
    with pytest.raises(ConfigError, match="cannot run 3d-rpe: pages of 24 tokens"):
        Steps(law_for(), device, sequences=1, heads=2, groups=1, longest=100, page=24)


def test_a_step_of_more_sequences_than_were_said_is_refused(device):
    server = Server(law_for(), device)
    text = Text(server)
    server.write({text: 5})
    with pytest.raises(ConfigError, match="larger than announced"):
        server.check(*[text] * 40)


def test_room_is_large_enough_for_every_batch(monkeypatch):
    """The bound that `Steps` computes, held to what launches ask for, on an H200's 132 multiprocessors."""
    from rpe3d import make_law
    from rpe3d.attention.chosen import paged, step

    for module in (paged, step):
        monkeypatch.setattr(module, "_processors", lambda _: 132)
    law = make_law("3d-rpe", pretrained=8192, context=131072, head_dim=128, far=64)
    device = torch.device("cpu")
    for h, g in ((32, 8), (8, 8), (16, 1), (28, 4)):
        bytes = paged.room(law, 300, h, g, 131072, device)
        cache = torch.empty(2, g, 16, 128, dtype=torch.bfloat16)
        for b in (1, 2, 3, 5, 16, 33, 64, 100, 256, 300):
            q = torch.empty(b, h, 1, 128, dtype=torch.bfloat16)
            made = step.Launches(
                law, q, cache, cache, q, (None, None, 0, 0, 1, 0, 0, 0), groups=g, keys=131072, scale=1.0,
                paged={"PAGE": 16, "LATER": 2, "START": 2, "EACH": 2},
            )  # fmt: skip
            assert paged._nbytes(made, b, h, g, 128) <= bytes


def test_what_pages_take_beside_their_keys():
    """3.3 % of a cache in bfloat16, for blocks of 16 keys."""
    from rpe3d import make_law
    from rpe3d.attention.chosen.paged import Layout

    law = make_law("3d-rpe", pretrained=8192, context=131072, head_dim=128, far=64)
    for page in (16, 32, 64):
        layout, cache = Layout.of(law, page, 128), page * 8 * 2 * 128 * 2
        assert layout.padded(cache, 8, 128) / cache < 1.034
        assert layout.padded(cache, 8, 128) % 128 == 0
