"""The kernels of a chosen far field: they choose as the specification does, and attend to what they chose."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from itertools import cycle

import pytest
import torch

from rpe3d.attention import chosen
from rpe3d.attention.chooser import Chooser
from rpe3d.attention.problem import check
from rpe3d.testing import assert_as_good, in_float64, random_problem, small_law

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
]

OWN = {
    "pretrained": 256,
    "context": 4096,
    "chunk": 32,
    "window": 64,
    "reach": 160,
    "focus": 0.0,
    "fade": 0.0,
    "sinks": 0,
}


def law_for(far=5, **changes):
    return small_law("3d-rpe", **OWN | {"head_dim": 32, "block": 16, "far": far} | changes)


def problem(law, device, *, t=200, s=None, **options):
    return random_problem(law, device, **{"h": 4, "g": 2, "t": t, "s": s or t} | options)


def picked(x, made):
    """The blocks that the kernels have every query choose, [b, g, t, m], as the specification has them."""
    (span,) = made.spans
    selection, blocks = made.selection, made.selection.choosable(span.queries[-1])
    summaries, centre = selection.summaries(x.k, blocks)
    found = torch.zeros(x.q.shape[0], x.k.shape[1], x.q.shape[2], blocks, dtype=torch.bool)
    for some in made._stretches(span.queries, x.k.shape[1], made.room):
        unions = selection.room(*x.k.shape[:2], some, x.q.device)
        work = [(some, made._pieces(some, x.k.shape[1], made.levels))]
        selection.unite(unions, x.q, x.k, centre, summaries, work, first=some.start, there=span.queries)
        for b, g, tile in torch.cartesian_prod(*(torch.arange(n) for n in unions.ends.shape[:3])).tolist():
            for entry in range(int(unions.ends[b, g, tile, 2])):
                word = int(unions.bits[b, g, tile, entry])
                for r in range(selection.tile):
                    if word >> r & 1:
                        row = some.start + tile * selection.tile + r - span.queries.start
                        found[b, g, row, int(unions.picked[b, g, tile, entry])] = True
    return found


def assert_chosen_alike(x, found):
    """Where they differ, the two differ by blocks whose scores are two steps apart at most: the rounding of sums."""
    y = in_float64(x)
    chooser = Chooser(y, x.law.regions[-1])
    truth = chooser.blocks(y)[..., : found.shape[3]].cpu()
    assert (truth.sum(-1) == found.sum(-1)).all()
    level = chooser.aims(y) @ chooser.summaries.transpose(2, 3) / chooser.choice.STEP
    level = level[..., : found.shape[3]].cpu()
    for place in (truth != found).any(-1).nonzero().tolist():
        ours, theirs = (
            level[tuple(place)][rows] for rows in ((found & ~truth)[tuple(place)], (truth & ~found)[tuple(place)])
        )
        assert (ours - theirs).abs().max() <= 2
    assert (truth != found).any(-1).double().mean() < 0.02


@pytest.mark.parametrize("first", [0, 16, 128])
def test_the_first_blocks_are_always_chosen(first, device):
    """An eighth of 17 blocks, at most."""
    x = problem(law_for(17, first=first), device, dtype=torch.float32, t=40, s=500)
    found = picked(x, chosen.Kernels(x))
    assert_chosen_alike(x, found)
    assert found[..., : 2 if first == 128 else 1].all()
    assert not found[..., 1].all() or first == 128


@pytest.fixture
def grouped(monkeypatch):
    """Few blocks are searched as many are: first the tops of groups."""
    from rpe3d.attention.chosen import select

    monkeypatch.setattr(select, "DIRECT", 0)


@pytest.mark.usefixtures("grouped")
@pytest.mark.parametrize("far", [1, 11])
@pytest.mark.parametrize("block", [4, 8, 16])
def test_they_find_the_best_blocks_among_those_of_the_best_groups(block, far, device):
    """Eight, four or two blocks to a group, and more groups than a query chooses blocks."""
    x = problem(law_for(far, block=block), device, dtype=torch.float32, h=2, g=1, t=40, s=901)
    found = picked(x, chosen.Kernels(x))
    assert found.shape[3] // min(8, 32 // block) > far
    assert_chosen_alike(x, found)


@pytest.mark.parametrize(
    ("direct", "widest", "far"), [(0, 16384, 1), (0, 16384, 40), (2048, 16384, 7), (0, 16, 7), (2048, 64, 40)]
)
def test_of_blocks_that_score_alike_the_nearer_are_chosen(direct, widest, far, device, monkeypatch):
    """Keys of zeros score alike; of the others some are in every group, in one alone, or there are none.

    Searched by groups and directly, in registers and in several parts that are read anew.
    """
    from rpe3d.attention.chosen import select

    monkeypatch.setattr(select, "DIRECT", direct)
    monkeypatch.setattr(select, "HELD", widest)
    x = problem(law_for(far, block=4), device, dtype=torch.float32, h=2, g=1, t=40, s=901)
    for some in (slice(0, 0), slice(300, 304), slice(3, 901, 32), slice(100, 600, 7)):
        k = torch.zeros_like(x.k)
        k[:, :, some] = x.k[:, :, some]
        y = replace(x, k=k)
        assert_chosen_alike(y, picked(y, chosen.Kernels(y)))


@pytest.mark.parametrize("halves", [1, 2])
def test_a_list_has_what_both_halves_of_a_tile_choose_first(halves, device):
    """Then what the first half chooses alone, then the second; without halves all is of the second."""
    x = problem(law_for(3), device, dtype=torch.float32, h=4, g=1, t=150, s=300)
    made = chosen.Kernels(x, shape=(32, halves))
    (span,) = made.spans
    (few,) = made.few_heads(span, x.q, x.k)
    for some in made._stretches(span.queries, 1, made.room):
        unions = made.unions(span, few, x.q, some)
        assert unions.picked.dtype == torch.int16
        for tile, (both, one, end) in enumerate(unions.ends[0, 0].tolist()):
            words = [word % 2**32 for word in unions.bits[0, 0, tile, :end].tolist()]
            kinds = [2 * (word % 2**16 == 0) + (word >= 2**16 and word % 2**16 > 0) for word in words]
            order = [1] * both + [0] * (one - both) + [2] * (end - one)
            assert (kinds == order) if halves == 2 else (both == one == 0)
            for part in (slice(both), slice(both, one), slice(one, end)):
                blocks = unions.picked[0, 0, tile, part].tolist()
                assert blocks == sorted(set(blocks))


class Given(Chooser):
    """A chooser that says what the kernels chose."""

    def __init__(self, found, size, groups):
        self.found, self.size, self.groups = found, size, groups

    def __call__(self, x):
        block = torch.arange(x.k.shape[2]) // self.size
        found = torch.nn.functional.pad(self.found, (0, 1))  # nothing is chosen beyond
        seen = found[..., block.clamp(max=self.found.shape[3])]
        return seen.repeat_interleave(self.groups, 1).to(x.q.device)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float32},
        {"dtype": torch.float32, "h": 4, "g": 1},
        {"dtype": torch.float32, "t": 50, "s": 233},
        {},
        {"h": 4, "g": 1},
        {"h": 3, "g": 1, "t": 150},
        {"h": 6, "g": 1},
        {"h": 10, "g": 1},
        {"h": 2, "g": 2},
        {"b": 2},
        {"t": 50, "s": 233},
        {"t": 77, "s": 77},
    ],
)
@pytest.mark.parametrize("decay", [0.9, 0.6])
def test_they_choose_as_the_specification_does_and_attend_to_that(options, decay, device):
    x = problem(law_for(decay=decay), device, **{"dtype": torch.bfloat16} | options)
    assert chosen.kernels_refusal(x) is None
    made = chosen.Kernels(x)
    out, lse = made(x.q, x.k, x.v, x.sinks)
    found = picked(x, made)
    assert_chosen_alike(x, found)
    given = {x.law.regions[-1]: Given(found, 16, x.q.shape[1] // x.k.shape[1])}
    assert_as_good(x, out, lse, choosers=given)


def test_how_work_is_cut_changes_no_choice(device, monkeypatch):
    """Parts that are shorter than the room for aims, pieces that begin within a part, rows of a kind in shared room.

    And programs that compute the levels of many blocks, a few at a time.
    """
    from rpe3d.attention.chosen import select

    monkeypatch.setattr(select, "DIRECT", 16)  # direct searches, then groups
    x = problem(law_for(block=4), device, dtype=torch.float32, b=2, t=300, s=340)
    made = chosen.Kernels(x)
    (span,), selection = made.spans, made.selection
    queries, tile = made._stretches(span.queries, 1, 10**9)[0], selection.tile
    summaries, centre = selection.summaries(x.k, selection.choosable(span.queries[-1]))

    def cut(positions, *tiles):
        for length in cycle(tiles):
            yield positions[: length * tile]
            positions = positions[length * tile :]
            if not positions:
                return

    def found(work):
        unions = selection.room(*x.k.shape[:2], queries, x.q.device)
        for part in unions:
            part.fill_(-1)
        selection.unite(unions, x.q, x.k, centre, summaries, work, first=queries.start, there=span.queries)
        return unions

    whole = found([(queries, [queries])])
    for name, few in (("COLUMNS", 16), ("SPAN", 32), ("PROGRAMS", 1)):
        monkeypatch.setattr(select, name, few)
    for parts, pieces in (((3, 1, 4), (1, 2)), ((2, 5), (2, 1))):
        work = [(part, list(cut(part, *pieces))) for part in cut(queries, *parts)]
        assert len(work) > 2
        for ours, truth in zip(found(work), whole, strict=True):
            assert torch.equal(ours, truth)


@pytest.mark.parametrize(
    ("options", "padded"),
    [({}, False), ({"t": 50}, True), ({"sinks": torch.tensor([-5.0, 3.0, 0.0, 1.0])}, True)],
)
def test_near_keys_may_be_one_kernel(options, padded, device):
    """As they are for short prompts, whose calls would keep the host busier than the GPU; padding included."""
    t, s = options.pop("t", 150), 150
    if padded:
        mask = torch.arange(s) >= torch.tensor([[0], [31], [s]])
        keys = (mask.cumsum(-1) - 1).clamp(min=0)
        options |= {"b": 3, "query_mask": mask[:, -t:], "key_mask": mask}
        options |= {"query_positions": keys[:, -t:], "key_positions": keys}
    x = problem(law_for(), device, dtype=torch.float32, t=t, s=s, **options)
    one, other = (chosen.Kernels(x, near=near) for near in ("kernel", "calls"))
    assert one.near is not one.calls
    assert other.near is other.calls
    truths = other(x.q, x.k, x.v, x.sinks)
    for q in (x.q, x.q.contiguous()):  # as another layer may have it in memory
        for ours, truth in zip(one(q, x.k, x.v, x.sinks), truths, strict=True):
            torch.testing.assert_close(ours, truth, rtol=0, atol=5e-6)


def test_short_prompts_take_near_keys_as_one_kernel_on_a_gpu(monkeypatch):
    """On any machine: the choice, not the run. Of 32 + 8 heads x 128; in float32 the library is faster."""
    monkeypatch.setattr(chosen.prefill, "Step", lambda *given: None)
    law = law_for(128, pretrained=8192, context=1048576, chunk=512, window=2560, reach=4096, head_dim=128)

    def near(tokens, dtype=torch.bfloat16):
        q, k = (torch.empty(1, heads, tokens, 128, dtype=dtype, device="meta") for heads in (32, 8))
        made = chosen.Kernels(check(q, k, k, law, rotated=True))
        assert made.calls.work()[0] > 20
        return "calls" if made.near is made.calls else "kernel"

    assert near(16384) == "kernel"
    assert near(32768) == near(262144) == near(16384, torch.float32) == "calls"


def test_stretches_and_heads_change_nothing(device):
    """Little room is many launches: key head by key head, tile by tile. Their sums are the same."""
    x = problem(law_for(), device, dtype=torch.float32, h=8, g=2, b=2, t=130, s=260)
    whole = chosen.Kernels(x)
    out = whole(x.q, x.k, x.v, x.sinks)
    (span,) = whole.spans
    assert whole._together(span.queries, 2, 2, 10000) == 2
    small = chosen.Kernels(x)
    small.levels, small.room, small.aims = 2000, 600, 500
    assert small._together(span.queries, 2, 2, 10000) == 1
    assert len(small._stretches(span.queries, 2, small._left(20000))) > 1
    for one, other in zip(out, small(x.q, x.k, x.v, x.sinks), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("tokens", "launches"), [(16384, 2), (32768, 4), (65536, 8), (131072, 16), (262144, 32)])
def test_a_prompt_needs_a_tenth_of_its_vectors_in_memory(tokens, launches):
    """Of 32 + 8 heads x 128 in bfloat16: buffers and the log-sum-exp beside q, k, v and the output, at any time."""
    law = law_for(128, pretrained=8192, context=1048576, chunk=512, window=2560, reach=4096, head_dim=128)
    q, k = (torch.empty(1, 1, 1, 1, dtype=torch.bfloat16).expand(1, heads, tokens, 128) for heads in (32, 8))
    made = chosen.Kernels(check(q, k, k, law, rotated=True))
    (span,) = made.spans
    selection, blocks = made.selection, made.selection.choosable(tokens - 1)
    heads = made._together(span.queries, 1, 8, blocks * 16 * 256)
    stretches = made._stretches(span.queries, heads, made._left(heads * blocks * 16 * 256))
    assert 8 // heads * len(stretches) == launches
    turned = heads * blocks * 16 * 256
    lists = max(heads * len(some) // selection.tile * selection.list_bytes(blocks) for some in stretches)
    scores = aims = 0
    for some in stretches:  # as `unions` cuts them
        spare = made._left(turned) - heads * len(some) // selection.tile * selection.list_bytes(blocks)
        levels = min(chosen.LEVELS, made.levels + max(0, spare))
        for part in made._cut(some, made.aims, heads * 256):
            aims = max(aims, heads * 256 * len(part))
            for piece in made._pieces(part, heads, levels):
                each = selection.row_bytes(selection.choosable(piece[-1]))
                scores = max(scores, heads * len(piece) * each)
    far = turned + lists + scores + aims
    near = 2 * min(8192, made.calls.rows) * 32 * (256 + 4)
    assert max(far, near) + 128 * tokens <= 0.1 * 20480 * tokens


def stepped(x, memory=None, **options):
    """A decoding step by the kernels."""
    from rpe3d.attention.chosen import step

    made = step.Step(x, **options)
    return made(x.q, x.k, x.v, x.sinks, memory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"h": 6, "g": 1, "s": 200}, {"b": 2, "t": 3}, {"s": 97}, {"s": 60}])
def test_a_step_is_the_specification(options, dtype, device):
    x = problem(law_for(), device, dtype=dtype, **{"t": 1, "s": 233} | options)
    assert_as_good(x, *stepped(x))


@pytest.mark.parametrize("changes", [{"block": 4}, {"chunk": 96, "window": 96, "reach": 256}, {"block": 32}])
def test_a_step_chooses_by_groups_of_any_size(changes, device):
    """Of 8, 2 and 1 blocks: what a chunk is made of."""
    x = problem(law_for(**changes), device, dtype=torch.float32, t=2, s=430)
    assert_as_good(x, *stepped(x))


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("changes", [{"rotary_dim": 20}, {"interleaved": True, "decay": 0.7}])
def test_a_step_rotates_as_its_law_does(changes, trusted, device):
    """Some dimensions only, which are no power of two; neighbouring ones."""
    x = problem(law_for(**changes), device, dtype=torch.float32, t=1, s=233)
    assert_as_good(x, *stepped(x, trusted=trusted))


@pytest.mark.parametrize(("t", "trusted"), [(1, False), (1, True), (2, True)])
def test_a_program_of_a_step_scores_more_blocks_than_it_can_at_a_time(t, trusted, device, monkeypatch):
    from rpe3d.attention import Memory
    from rpe3d.attention.chosen import step

    monkeypatch.setattr(step, "_processors", lambda _: 1)
    x, memory = problem(law_for(block=4), device, dtype=torch.float32, h=2, t=t, s=1500), Memory()
    assert_as_good(x, *stepped(x, memory, trusted=trusted))
    assert_as_good(x, *stepped(x, memory, trusted=trusted))


def test_a_step_sees_the_first_blocks_as_the_specification_does(device):
    x = problem(law_for(17), device, dtype=torch.float32, t=2, s=500)
    assert_as_good(x, *stepped(x))


def test_what_is_kept_of_a_cache_is_checked_against_its_keys(device):
    """Steps, a crop and another text, other first keys, one other key far back, rows in another order."""
    from rpe3d.attention import Memory

    law, memory = law_for(), Memory()
    x, other = (problem(law, device, t=1, s=200, b=2, h=2, g=1, dtype=torch.bfloat16) for _ in range(2))

    def step(k, s, kept):
        y = replace(x, k=k[:, :, :s], v=x.v[:, :, :s], keys=range(s), queries=range(s - 1, s))
        return stepped(y, kept)[0]

    changed = [y.clone() for y in (x.k, x.k, x.k, x.k.flip(0))]
    changed[0][:, :, 70:] = other.k[:, :, 70:]
    changed[1][:, :, 5] = other.k[:, :, 5]
    changed[2][1, 0, 57] = other.k[1, 0, 57]
    plain = step(x.k, 200, None)
    blocks = law.regions[-1].unit // 16 * (199 // 32 - 2)
    for k, s in ((x.k, 199), (x.k, 200), *((k, 200) for k in changed), (x.k, 140), (x.k, 200)):
        fresh = Memory()
        assert torch.equal(step(k, s, memory), step(k, s, fresh))
        if s == 200:
            assert torch.equal(memory.summaries[:, :, :blocks], fresh.summaries[:, :, :blocks])
            assert torch.equal(memory.centre, fresh.centre)
    kept = memory.summaries[:, :, :blocks].clone()
    step(x.k, 200, memory)
    assert torch.equal(memory.summaries[:, :, :blocks], kept)  # nothing was made again
    memory.summaries.zero_()
    assert not torch.equal(step(x.k, 200, memory), plain)  # and what is kept is used


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_that_change_their_signs_alone_are_noticed(dtype, device):
    from rpe3d.attention import Memory

    x, memory = problem(law_for(), device, t=1, s=200, h=2, g=1, dtype=dtype), Memory()
    stepped(x, memory)
    signs = torch.ones(200, device=device)
    signs[[40, 41]] = -1  # an even number of them
    for k in (-x.k, x.k * signs[:, None].to(dtype)):
        y, fresh = replace(x, k=k), Memory()
        assert torch.equal(stepped(y, memory)[0], stepped(y, fresh)[0])
        assert torch.equal(memory.summaries[:, :, :8], fresh.summaries[:, :, :8])


def test_a_step_whose_queries_stand_after_all_keys_is_refused(device):
    """The kernels take every key up to a query's own position for one that there is."""
    from rpe3d.attention.decode import step_refusal

    keys = torch.arange(100)[None]
    for there in (range(100), keys):
        for first, refused in ((99, False), (100, True), (500, True)):
            queries = range(first, first + 1) if there is not keys else torch.tensor([[first]])
            x = problem(law_for(), device, t=1, s=100, query_positions=queries, key_positions=there)
            assert (step_refusal(x) == "a query stands after all keys") == refused


def test_a_trusted_cache_is_summarized_once_when_it_has_far_keys(device):
    """A memory that is fresh, one that has seen no far key yet, one that has, and one that was not trusted."""
    from rpe3d.attention import Memory

    law, memory = law_for(), Memory()
    x = problem(law, device, t=1, s=200, b=2, h=2, g=1, dtype=torch.bfloat16)

    def step(s, kept, trusted=True):
        y = replace(x, k=x.k[:, :, :s], v=x.v[:, :, :s], keys=range(s), queries=range(s - 1, s))
        return stepped(y, kept, trusted=trusted)[0]

    assert_as_good(x, *stepped(x, Memory(), trusted=True))
    for s in (60, 61, 140, 141, 200, 140):
        assert torch.equal(step(s, memory), step(s, Memory()))
        assert (memory.centre_print == (-1 if s < 96 else 0)).all()
    centre, plain = memory.centre.clone(), step(200, memory)
    x.k[:, :, :5] = 0
    step(200, memory)
    assert torch.equal(memory.centre, centre)  # nobody looked
    fresh = step(200, None, trusted=False)
    torch.testing.assert_close(step(200, memory, trusted=False), fresh, rtol=0, atol=0)
    torch.testing.assert_close(step(200, memory), step(200, Memory()), rtol=0, atol=0)
    assert not torch.equal(memory.centre, centre)
    assert not torch.equal(fresh, plain)


def test_what_a_graph_has_captured_is_not_freed(device, monkeypatch):
    """A replay writes to the summaries that were there at the capture, also after a longer cache has had others."""
    from rpe3d.attention.chosen import memory as module

    law, memory = law_for(), module.Memory()
    k = torch.randn(1, 1, 64, 32, device=device)
    memory.prepare(law, k, 8)
    first = memory.summaries
    memory.prepare(law, k, 64)
    assert memory.summaries is not first
    assert not memory.captured
    captured = memory.summaries
    monkeypatch.setattr(module, "capturing", lambda _: True)
    memory.prepare(law, k, 64)
    monkeypatch.setattr(module, "capturing", lambda _: False)
    memory.prepare(law, k, 128)
    assert memory.summaries is not captured
    assert any(one is captured for kept in memory.captured.values() for one in kept)


@pytest.mark.parametrize("most", [5, 40])
@pytest.mark.parametrize("per_chunk", [1, 12, 8, 32])
@pytest.mark.parametrize("kind", ["ties", "lowest", "random", "rising", "highest"])
def test_blocks_are_chosen_by_level_and_of_those_that_are_level_the_last(kind, per_chunk, most, device):
    """Whatever the levels, and however many blocks there are: sorting is the specification."""
    import math

    from rpe3d.attention.chosen import step

    for can in (per_chunk, 96, 480):
        levels = {
            "ties": torch.randint(-3, 3, (can,)),
            "lowest": torch.full((can,), -32768),
            "random": torch.randn(can) * 4000,
            "rising": torch.arange(can),
            "highest": torch.where(torch.rand(can) < 0.2, 32767, torch.randint(-32768, 32767, (can,))),
        }[kind].to(torch.int16)
        together = math.gcd(step.TOGETHER, per_chunk)
        room = torch.full((512,), 32767, dtype=torch.int16)  # what lies beyond is not chosen
        room[:can] = levels
        given = [x.to(device) for x in (room, room.view(-1, together).amax(1))]
        device = given[0].device  # with its number, as a launch needs it
        picked, lists = (torch.full((most + 1,), -1, dtype=torch.int32, device=device) for _ in range(2))
        counts = torch.empty(1, dtype=torch.int32, device=device)
        made = torch.full((1,), -1, dtype=torch.int64, device=device)
        groups = 1 << (max(can // together, 128) - 1).bit_length()
        step._choose(
            device,
            (1, 1, 1),
            (
                *given, picked, counts, lists, made, None, None, None,
                (can // per_chunk + 1) * 16 * per_chunk, 0, 0, 0, 0, 0, 512,
            ),
            {
                "MOST": most, "QUERIES": 1, "SIZE": 16, "CHUNK": 16 * per_chunk, "NEAR": 1, "TOGETHER": together,
                "ACROSS": groups, "TILES": 1, "WIDE": 1 << (most - 1).bit_length(), "TRUSTED": False,
                "PAGE": 0,
            },
            {"num_warps": 4},
        )  # fmt: skip
        order = sorted(range(can), key=lambda n: (int(levels[n]), n), reverse=True)[:most]
        assert picked[: len(order)].tolist() == sorted(order)
        assert counts.item() == len(order)
        assert picked[-1] == lists[-1] == -1  # nothing was written past the end


def test_layers_that_share_room_compute_as_each_alone(device):
    """A layer finds what the one before left: other levels, lists and counts, and counters that are zero again."""
    from rpe3d.attention import Memory
    from rpe3d.attention.chosen.step import Step

    law, layers = law_for(), []
    for seed in range(2):
        torch.manual_seed(seed)
        layers.append(problem(law, device, dtype=torch.float32, t=1, s=200))
    shared, memories = Step(layers[0], splits=3), [Memory() for _ in layers]
    alone = [Step(x, splits=3)(x.q, x.k, x.v, None)[0] for x in layers]
    for _ in range(2):
        for x, memory, truth in zip(layers, memories, alone, strict=True):
            assert torch.equal(shared.output(x.q, x.k, x.v, None, memory), truth)
