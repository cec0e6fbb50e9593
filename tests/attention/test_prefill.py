"""The prefill kernel against the specification in float64: every law, any shape, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from rpe3d import ConfigError, laws, make_law
from rpe3d.attention import attention, blocked, explain, prefill, reference
from rpe3d.attention.choose import prompt
from rpe3d.attention.problem import check
from rpe3d.attention.spans import spans
from rpe3d.testing import assert_as_good, in_float64, random_problem, small_law

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
]

SHAPES = ("rope", "3d-rpe", "dca", "self-extend", "streaming-llm")


def law_for(name, **changes):
    own = {"reach": 56, "focus": 0.5, "fade": 0.25} if name == "3d-rpe" else {}
    return small_law(name, **{"head_dim": 32} | own | changes)


def problem(law, device, *, t=150, s=None, **options):
    x = random_problem(law, device, **{"h": 2, "g": 1, "t": t, "s": s or t} | options)
    k, v = (y.transpose(1, 2).contiguous().transpose(1, 2) for y in (x.k, x.v))  # a token's heads together
    return replace(x, k=k, v=v)


def run(x, **options):
    return prefill.Step(x, list(spans(x)), **options)(x.q, x.k, x.v, x.sinks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", laws())
def test_every_law_is_as_good_as_eager(name, dtype, device):
    x = problem(law_for(name), device, dtype=dtype)
    assert_as_good(x, *run(x))


@pytest.mark.parametrize("t", [1, 16, 17, 48, 49, 64, 65, 131])
@pytest.mark.parametrize("name", SHAPES[1:])
def test_any_length_around_chunk_window_and_tile(name, t, device):
    x = problem(law_for(name), device, t=t)
    assert_as_good(x, *run(x, block_m=32, block_n=16))


@pytest.mark.parametrize("blocks", [(16, 64), (64, 16), (32, 32)])
@pytest.mark.parametrize("name", ["3d-rpe", "dca", "rerope"])
def test_tiles_may_be_longer_or_shorter_than_chunks(name, blocks, device):
    """Chunks of 1 to 20 tokens and of more than the text: many in a tile, none in step with it, all in one."""
    sizes = {
        "3d-rpe": [{"chunk": c, "window": 2 * c, "sinks": min(c, 3)} for c in (1, 7, 16)],
        "dca": [{"chunk": 3, "window": 5}],
    }
    for parameters in sizes.get(name, [{"window": 1}, {"window": 63}]):
        x = problem(law_for(name, **parameters), device, t=90)
        assert_as_good(x, *run(x, block_m=blocks[0], block_n=blocks[1]))


@pytest.mark.parametrize("t", [1, 18, 64, 100])
@pytest.mark.parametrize("name", SHAPES)
def test_a_prompt_may_follow_a_cache(name, t, device):
    x = problem(law_for(name), device, t=t, s=170)
    assert_as_good(x, *run(x, block_m=32))


@pytest.mark.parametrize("first", [5, 16, 100_003])
@pytest.mark.parametrize("name", SHAPES)
def test_positions_may_start_anywhere(name, first, device):
    law = law_for(name, context=200_000, **({"group": 20_000} if name == "self-extend" else {}))
    x = problem(law, device, t=70, query_positions=range(first, first + 70), key_positions=range(first, first + 70))
    assert_as_good(x, *run(x, block_m=32))


@pytest.mark.parametrize(("h", "g", "d"), [(2, 2, 16), (3, 1, 64), (4, 2, 80), (6, 2, 96), (2, 1, 20), (1, 1, 256)])
def test_any_group_of_heads_and_head_dimension(h, g, d, device):
    x = problem(law_for("3d-rpe", head_dim=d), device, b=2, h=h, g=g, t=70)
    assert_as_good(x, *run(x))


@pytest.mark.parametrize("model", [{"rotary_dim": 16}, {"interleaved": True}])
def test_pairs_are_the_model_s_own(model, device):
    x = problem(law_for("3d-rpe", **model), device, t=90)
    assert_as_good(x, *run(x))


def test_heads_in_bunches_are_all_done(device, monkeypatch):
    """Bunches as if one, or one and a half, key heads fitted into the cache; the last bunch is smaller."""
    from rpe3d.attention.prefill import kernel as prefill_kernel

    x = problem(law_for("3d-rpe"), device, h=6, g=3, t=90)
    for heads in (1, 2):
        monkeypatch.setattr(prefill_kernel, "CACHED", heads * 3 * 90 * 32 * 4)
        assert_as_good(x, *run(x))


def padded(law, device, side, *, t=None, **options):
    """Three sequences, one of them whole, of 100 slots; the queries are in the last t of them."""
    s, lengths = 100, torch.tensor([100, 61, 9])
    index = torch.arange(s)
    mask = index >= s - lengths[:, None] if side == "left" else index < lengths[:, None]
    keys = (mask.cumsum(-1) - 1).masked_fill(~mask, 1)
    last = slice(s - (t or s), s)
    return problem(law, device, b=3, t=t or s, s=s, query_positions=keys[:, last], key_positions=keys,
                   query_mask=mask[:, last], key_mask=mask, **options)  # fmt: skip


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_sequence_has_its_own_padding(name, side, device):
    """Keys and values of padding are NaN: they are not looked at."""
    x = padded(law_for(name), device, side)
    for y in (x.k, x.v):
        y.masked_fill_(~x.key_mask[:, None, :, None], torch.nan)
    assert_as_good(x, *run(x, block_m=32))


def test_a_padded_prompt_may_follow_a_cache_and_a_sequence_may_have_no_tokens(device):
    x = padded(law_for("3d-rpe"), device, "left", t=30)
    assert_as_good(x, *run(x, block_m=16))
    empty = padded(law_for("3d-rpe"), device, "right", t=50)  # the two shorter ones end before, or in the middle
    assert_as_good(empty, *run(empty, block_m=16))


def test_sequences_alike_are_one_span(device):
    positions = torch.arange(70).expand(2, 70)
    x = problem(law_for("3d-rpe"), device, b=2, t=70, query_positions=positions, key_positions=positions)
    step = prefill.Step(x, list(spans(x)))
    assert step.options["spans"] is None
    assert_as_good(x, *step(x.q, x.k, x.v, None))


@pytest.mark.parametrize("side", ["left", None])
def test_sinks_softcap_and_scale_take_part(side, device):
    options = {"scale": 0.3, "softcap": 4.0, "sinks": torch.tensor([-5.0, 20.0])}
    x = padded(law_for("3d-rpe"), device, side, **options) if side else problem(law_for("dca"), device, **options)
    out, lse = run(x)
    assert_as_good(x, out, lse)
    without = run(replace(x, sinks=None))[1]
    torch.testing.assert_close(lse, torch.logaddexp(without, x.sinks[None, :, None]), rtol=0, atol=4e-6)


@pytest.mark.parametrize("focus", [0, 1.5])
@pytest.mark.parametrize("options", [{}, {"softcap": 4.0, "sinks": torch.tensor([-5.0, 3.0])}])
def test_far_keys_fade(options, focus, device):
    law = law_for("3d-rpe", focus=focus, fade=1.5, reach=50)
    x = problem(law, device, t=60, s=200, **options)
    for ours, truth in zip(run(x, block_m=32), reference.attend(in_float64(x)), strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=0, atol=3e-6)
    without = run(replace(x, law=law_for("3d-rpe", reach=50, focus=0, fade=0)), block_m=32)
    assert (without[1] - run(x)[1]).min() > 0.1


def test_a_sink_may_weigh_nothing(device):
    x = padded(law_for("3d-rpe"), device, "left", sinks=torch.full((2,), -torch.inf))
    for ours, plain in zip(run(x), run(replace(x, sinks=None)), strict=True):
        assert torch.equal(ours, plain)


def test_layers_share_a_step(device):
    """Made from one layer's vectors, it runs another's, and what it returns is laid out as q is."""
    x = problem(law_for("dca"), device)
    step = prefill.Step(x, list(spans(x)))
    step(x.q, x.k, x.v, None)
    other = problem(law_for("dca"), device)
    out, lse = step(other.q, other.k, other.v, None)
    assert_as_good(other, out, lse)
    assert out.stride() == other.q.stride()


def test_tiles_that_no_region_holds_are_not_visited(device, monkeypatch):
    """Streaming: a window and four sinks. Keys between them are NaN for the last tile of queries, which runs alone."""
    x = problem(law_for("streaming-llm"), device, t=16, s=200)
    x.k[:, :, 48:112], x.v[:, :, 48:112] = torch.nan, torch.nan
    out, lse = run(x, block_m=16, block_n=16)
    clean = in_float64(x)
    assert_as_good(replace(x, k=clean.k.float(), v=clean.v.float()), out, lse)


def test_it_can_be_asked_for(device):
    """Vectors that are not turned yet, scattered in memory: as every implementation takes them."""
    law = law_for("3d-rpe")
    q, k, v = (torch.randn(1, 2, 32, 70, device=device).mT for _ in range(3))
    out, lse = attention(q, k, v, law, impl="prefill")
    truth, truth_lse = attention(q.double(), k.double(), v.double(), law, impl="reference")
    torch.testing.assert_close(out.double(), truth, rtol=0, atol=3e-6)
    torch.testing.assert_close(lse.double(), truth_lse, rtol=0, atol=3e-6)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"grad": True}, "it has no gradient"),
        ({"dtype": torch.float64}, "it computes in float32, not in float64"),
        ({"e": 16}, "head dimensions are 32 and 16, not one of up to 256"),
        ({"d": 288}, "head dimensions are 288 and 288, not one of up to 256"),
        ({"gap": True}, "its positions are not consecutive, or a query is not among the keys"),
    ],
    ids=["gradient", "float64", "values", "wide", "gap"],
)
def test_what_it_cannot_run_is_refused_with_the_reason(change, reason, device):
    law = law_for("3d-rpe", head_dim=change.get("d", 32))
    x = problem(law, device, t=40, dtype=change.get("dtype", torch.float32))
    v = x.v[..., : change["e"]] if "e" in change else x.v
    positions = torch.arange(40, device=device) * (2 if "gap" in change else 1)
    q = x.q.requires_grad_() if "grad" in change else x.q
    with pytest.raises(ConfigError, match=f"cannot run this: {reason}"):
        attention(q, x.k, v, law, query_positions=positions, key_positions=positions, rotated=True, impl="prefill")


def test_a_gpu_takes_it_where_it_saves_enough_calls(monkeypatch):
    """On any machine: the choice, not the run. Short prompts on which nothing is far stay the library's own call."""
    monkeypatch.setattr(prefill, "vectors_refusal", lambda x: None)
    monkeypatch.setattr(prefill, "prepare", lambda x: None)
    law = make_law("3d-rpe", pretrained=8192, context=65536, head_dim=64)

    def choice(t, h=8, law=law, dtype=torch.bfloat16, **options):
        q = torch.empty(1, h, t, 64, dtype=dtype, device="meta")
        x = check(q, q, q, law, rotated=True, **options)
        return prompt(x, blocked.Calls(x)).impl

    assert choice(2048) == "blocked"
    assert choice(8192) == "prefill"
    assert choice(8192, dtype=torch.float32) == "blocked"
    assert choice(2048, softcap=30.0) == "prefill"
    assert choice(2**17, h=64) == "blocked"
    streaming = make_law("streaming-llm", pretrained=8192, context=2**20, head_dim=64)
    assert choice(2**17, law=streaming) == "prefill"


def test_a_cpu_takes_library_calls():
    x = problem(law_for("3d-rpe"), torch.device("cpu"))
    assert explain(x) == ("blocked", "cpu attention calls, merged")
