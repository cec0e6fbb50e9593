"""The decoding step against the specification in float64: every law and shape, by the kernel and in plain PyTorch."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rpe3d.attention import decode, explain, lowering, reference
from rpe3d.attention.decode import plain as decode_plain
from rpe3d.attention.problem import Placed
from rpe3d.testing import assert_as_good, in_float64, random_problem, small_law

pytestmark = pytest.mark.usefixtures("poisoned")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

LAWS = (
    "rope",
    "linear",
    "ntk",
    "dynamic",
    "yarn",
    "longrope",
    "cope",
    "logn",
    "3d-rpe",
    "3d-rpe-definition",
    "3d-rpe-dual-chunk",
    "dca",
    "streaming-llm",
)
CHUNKED = ("3d-rpe", "3d-rpe-definition", "3d-rpe-dual-chunk", "dca")


def law_for(name, **changes):
    own = {"streaming-llm": {"pretrained": 128, "window": 70}, "self-extend": {"group": None}}.get(name, {})
    return small_law(name, **{"context": 1024} | own | changes)


def problem(law, device, *, queries=None, keys=None, **options):
    given = {"query_positions": queries, "key_positions": keys}
    return random_problem(law, device, **{name: x for name, x in given.items() if x is not None}, **options)


def by_kernel(x, splits=None):
    """In one part, in several of a tile or more, or as it chooses."""
    from rpe3d.attention.decode import kernel as decode_kernel

    options = {} if splits is None else {"splits": splits}
    options |= {} if splits in (None, 1) else {"least_tiles": 1}
    step = decode_kernel.Step(x, **options)
    return step(x.q, x.k, x.v, x.sinks)


def by_products(x, splits=None):
    return decode_plain.Step(x)(x.q, x.k, x.v, x.sinks)


@pytest.fixture(params=[pytest.param(by_kernel, marks=needs_triton), by_products], ids=["kernel", "plain"])
def run(request):
    """A decoding step, by each of its implementations; what is split is the kernel's matter."""
    return request.param


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", ["rope", "logn", *CHUNKED, "streaming-llm"])
def test_one_query_sees_its_cache_as_the_law_says(name, splits, device, run):
    x = problem(law_for(name), device)
    assert_as_good(x, *run(x, splits))


@pytest.mark.parametrize("name", ["linear", "ntk", "dynamic", "yarn", "longrope", "cope"])
def test_laws_that_change_frequencies_alone_are_plain_attention(name, device, run):
    x = problem(law_for(name), device)
    assert lowering.plan(x.law).turning == (False,)
    assert_as_good(x, *run(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["rope", *CHUNKED, "streaming-llm"])
def test_half_types_are_as_good_as_eager(name, dtype, device, run):
    x = problem(law_for(name), device, dtype=dtype, t=8)  # rows enough that the eager path's worst is typical of it
    assert_as_good(x, *run(x, 2))


@pytest.mark.parametrize("s", [1, 2, 15, 16, 17, 31, 48, 49, 65])
def test_any_length_around_chunk_and_window(s, device, run):
    x = problem(law_for("3d-rpe"), device, s=s)
    assert_as_good(x, *run(x))


@pytest.mark.parametrize("t", [2, 5, 16])
@pytest.mark.parametrize("name", ["rope", "3d-rpe", "dca", "streaming-llm"])
def test_several_queries_may_stand_in_different_chunks(name, t, device, run):
    """Rows of one tile then see the same key chunk in different regions."""
    x = problem(law_for(name), device, t=t, s=162)
    assert_as_good(x, *run(x, 2))


@pytest.mark.parametrize(
    ("h", "g", "d", "t"), [(2, 2, 128, 1), (3, 1, 80, 2), (8, 1, 96, 1), (2, 1, 256, 1), (8, 1, 64, 12)]
)
def test_any_group_of_heads_and_head_dimension(h, g, d, t, device, run):
    """Up to more rows than one tile holds (8 heads x 12 queries)."""
    x = problem(law_for("3d-rpe", head_dim=d), device, h=h, g=g, t=t, s=100)
    assert_as_good(x, *run(x, 2))


@pytest.mark.parametrize("model", [{"rotary_dim": 32}, {"interleaved": True}, {"interleaved": True, "rotary_dim": 48}])
@pytest.mark.parametrize("name", ["3d-rpe", "3d-rpe-definition"])
def test_pairs_are_the_model_s_own(name, model, device, run):
    x = problem(law_for(name, **model), device, s=120)
    assert_as_good(x, *run(x, 1))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["rope", "3d-rpe", "dca", "streaming-llm"])
def test_every_sequence_has_its_own_padding(name, side, device, run):
    """Positions as Hugging Face derives them from the mask; on the left they start where the padding ends."""
    s, t, lengths = 130, 3, torch.tensor([130, 77, 20])
    index = torch.arange(s)
    if side == "left":
        mask = index >= s - lengths[:, None]
        keys = (mask.cumsum(-1) - 1).masked_fill(~mask, 1)
        queries = keys[:, -t:]
    else:
        mask = index < lengths[:, None]
        keys = index.expand(3, s).masked_fill(~mask, 1)
        queries = lengths[:, None] - t + torch.arange(t)
    x = problem(law_for(name), device, b=3, t=t, s=s, queries=queries, keys=keys, key_mask=mask)
    assert_as_good(x, *run(x, 2))


def test_padding_may_be_longer_than_a_block_of_the_mask(device, run):
    s, pad = 4200, 4150
    mask = torch.arange(s)[None] >= pad
    keys = (torch.arange(s)[None] - pad).clamp(min=0)
    x = problem(law_for("3d-rpe"), device, s=s, queries=keys[:, -1:], keys=keys, key_mask=mask)
    assert_as_good(x, *run(x))


def test_padded_queries_see_nothing(device, run):
    mask = torch.tensor([[True, True, True], [False, False, True]])
    x = problem(law_for("3d-rpe"), device, b=2, t=3, s=70, query_mask=mask)
    out, lse = run(x)
    assert_as_good(x, out, lse)
    assert (out[1, :, :2] == 0).all()
    assert (lse[1, :, :2] == -torch.inf).all()


@pytest.mark.parametrize("name", ["rope", "3d-rpe", "streaming-llm"])
def test_a_cache_may_be_longer_than_its_tokens(name, device, run):
    """A static cache: each sequence is as long as its query says, and nothing beyond is looked at."""
    used = torch.tensor([[37], [150]])
    x = problem(law_for(name), device, b=2, s=256, queries=used - 1)
    for b, n in enumerate(used[:, 0].tolist()):
        x.k[b, :, n:], x.v[b, :, n:] = torch.nan, torch.nan
    assert_as_good(x, *run(x, 4))


@pytest.mark.parametrize("splits", [1, 3])
def test_sinks_softcap_and_scale_take_part(splits, device, run):
    x = problem(law_for("3d-rpe"), device, t=2, scale=0.3, softcap=4.0, sinks=torch.linspace(-5, 20, 6))
    out, lse = run(x, splits)
    assert_as_good(x, out, lse)
    without = run(replace(x, sinks=None), splits)[1]
    torch.testing.assert_close(lse, torch.logaddexp(without, x.sinks[None, :, None]), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", [*CHUNKED, "streaming-llm"])
def test_angles_are_right_at_position_one_million(name, device, run):
    """Steps of float32 are 0.06 there; the tolerance is that of short prompts."""
    law = law_for(name, context=2**20)
    x = problem(law, device, t=2, keys=range(1_000_000 - 150, 1_000_000), s=150)
    if name == "streaming-llm":  # its far keys are the first four
        x = problem(law, device, s=100, queries=torch.tensor([[1_000_000]]))
    assert_as_good(x, *run(x, 2))


def test_a_row_that_sees_nothing_is_zeros_and_minus_infinity(device, run):
    law = law_for("3d-rpe")
    masked = problem(law, device, s=40, key_mask=torch.zeros(1, 40, dtype=torch.bool))
    before = problem(law, device, s=40, keys=range(50, 90), queries=range(49, 50))
    for x in (masked, before):
        for splits in (1, 2):
            out, lse = run(x, splits)
            assert (out == 0).all()
            assert (lse == -torch.inf).all()
            sinks = torch.randn(6, device=device)
            out, lse = run(replace(x, sinks=sinks), splits)
            assert (out == 0).all()
            torch.testing.assert_close(lse, sinks[None, :, None].expand_as(lse), rtol=1e-6, atol=0)


def test_laws_with_equal_names_do_not_share_a_table(device, run):
    for chunk in (16, 32):
        x = problem(law_for("3d-rpe", chunk=chunk), device)
        assert_as_good(x, *run(x))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rotated": False}, "its keys must have been rotated by stock RoPE"),
        ({"t": 17}, "17 queries are more than 16"),
        ({"grad": "q"}, "it has no gradient"),
        ({"grad": "sinks"}, "it has no gradient"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_problem_that_no_step_can_run_is_refused_with_the_reason(change, reason, device):
    x = problem(law_for("rope"), device, t=change.get("t", 1), s=30, sinks=torch.zeros(6))
    if "grad" in change:
        getattr(x, change["grad"]).requires_grad_()
    if "rotated" in change:
        x = replace(x, rotated=False)
    assert decode.refusal(x) == reason
    if "t" not in change:
        assert explain(x) == ("reference", f"few queries, but no decoding step: {reason}")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"law": ("self-extend", {"window": 8})}, "its far keys rotate token by token"),
        ({"law": ("rerope", {"window": 8})}, "its far keys rotate token by token"),
        ({"law": ("leaky-rerope", {"window": 8})}, "its far keys rotate token by token"),
        ({"law": ("3d-rpe", {"chunk": 1, "window": 8, "sinks": 1})}, "its far keys rotate token by token"),
        ({"law": ("3d-rpe", {"chunk": 8, "window": 16})}, "its chunks of 8 tokens are shorter than 16"),
        ({"dtype": torch.float64}, "it computes in float32, not in float64"),
        ({"d": 72}, "head dimensions are 72 and 72, not one multiple of 16 up to 256"),
        ({"e": 32}, "head dimensions are 64 and 32, not one multiple of 16 up to 256"),
        ({"strided": True}, "q, k and v must be contiguous in their last dimension"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_kernel_cannot_run_is_run_without_it(change, reason, device):
    name, parameters = change.get("law", ("rope", {}))
    x = problem(law_for(name, head_dim=change.get("d", 64), **parameters), device, s=30)
    if "dtype" in change:
        x = in_float64(x)
    if "e" in change:
        x = replace(x, v=x.v[..., : change["e"]])
    if "strided" in change:
        x = replace(x, k=x.k.transpose(2, 3).contiguous().transpose(2, 3))
    assert decode.refusal(x) is None
    assert decode.kernel_refusal(x) == reason
    machine = decode.machine_refusal(x.q.device) or reason
    assert machine == reason or not x.q.is_cuda
    assert explain(x) == ("decode", f"few queries: plain PyTorch (the kernel: {machine})")
    for ours, truth in zip(decode.prepare(x)(x.q, x.k, x.v, x.sinks), reference.attend(in_float64(x)), strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=0, atol=2e-6)


@needs_triton
@pytest.mark.parametrize("masked", [False, True])
def test_keys_with_gaps_are_not_counted_on_from_the_first(device, masked):
    """The kernel finds a key by its distance from the first; whoever gives plain tensors is checked."""
    keys = torch.cat([torch.arange(0, 60), torch.arange(90, 190)]).expand(2, -1)
    mask = {"key_mask": torch.rand(2, 160) < 0.9} if masked else {}
    x = problem(law_for("3d-rpe"), device, b=2, s=160, queries=torch.full((2, 1), 189), keys=keys, **mask)
    assert decode.kernel_refusal(x) == "its key positions are not consecutive"
    assert explain(x)[0] == "reference"
    far = torch.arange(30, 190).expand(2, -1)
    x = problem(law_for("3d-rpe"), device, b=2, s=160, queries=torch.full((2, 1), 189), keys=far, **mask)
    assert decode.kernel_refusal(x) is None
    assert_as_good(x, *by_kernel(x))


@needs_triton
def test_a_step_allocates_and_launches_and_does_nothing_else(device, monkeypatch):
    """What a CUDA graph can capture: no copy, no wait, no small kernels around the one."""
    from rpe3d.attention.decode import kernel as decode_kernel
    from rpe3d.attention.decode import launch

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.add(function.overloadpacket.__name__)
            return function(*args, **kwargs or {})

    monkeypatch.undo()  # poisoning fills, which is no part of a step
    tensors = {"queries": torch.full((2, 1), 600), "keys": torch.arange(700).expand(2, 700)}
    masks = {"key_mask": torch.ones(2, 700, dtype=torch.bool), "query_mask": torch.ones(2, 1, dtype=torch.bool)}
    x = problem(law_for("3d-rpe"), device, b=2, s=700, sinks=torch.randn(6), **tensors, **masks)
    x = replace(x, key_placed=Placed(x.keys, starts=torch.zeros(2, dtype=torch.int64)))  # as a graph is given them
    lowering.table(x.law, x.q.device)  # as the first step does
    monkeypatch.setattr(decode_kernel._decode, "bind", lambda *launch: lambda *first: launched.append(first))
    monkeypatch.setattr(launch, "zeros", lambda n, device: counters)
    monkeypatch.setattr(launch, "_processors", lambda device: 132)
    launched, seen, counters = [], set(), torch.zeros(4, dtype=torch.int32)
    with Record():
        by_kernel(x)
    assert len(launched) == 1
    assert seen <= {"empty", "empty_like", "view", "slice", "detach"}  # the last three are views


@needs_triton
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", ["rope", "3d-rpe", "dca"])
def test_layers_that_share_their_room_keep_their_outputs(name, splits, device):
    """A later layer overwrites what an earlier one left for its splits, and not what it returned."""
    from rpe3d.attention.decode import kernel as decode_kernel

    layers = [problem(law_for(name), device, sinks=torch.randn(6, device=device)) for _ in range(3)]
    assert not torch.equal(layers[0].q, layers[1].q)
    step = decode_kernel.Step(layers[0], splits=splits, least_tiles=1)
    outputs = [step.output(x.q, x.k, x.v, x.sinks) for x in layers]
    for x, out in zip(layers, outputs, strict=True):
        assert torch.equal(out, step(x.q, x.k, x.v, x.sinks)[0])


@needs_triton
def test_splits_fill_the_machine_but_stay_worth_their_merge():
    """One program per multiprocessor, and no split of fewer than 256 keys."""
    from rpe3d.attention.decode.loop import LEAST_KEYS, split

    assert split(8, 32768, 132) == 16  # batch 1, 8 key heads on an H200: 128 programs
    assert split(64, 131072, 132) == 2
    assert split(1000, 131072, 132) == 1
    assert split(1, 1, 132) == 1
    for keys in (300, 1000, 5000):
        assert math.ceil(keys / LEAST_KEYS) >= split(2, keys, 132)


def test_attention_needs_no_triton_to_be_imported():
    code = "import sys; sys.modules['triton'] = None; import rpe3d.attention.decode, rpe3d.attention.merge"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ}, timeout=120)
