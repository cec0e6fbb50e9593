"""Prompts by FlashAttention over pages, held to the specification; the library's call is played by plain PyTorch."""

from __future__ import annotations

import math

import pytest
import torch
from flash import flash

from rpe3d import ConfigError, make_law
from rpe3d.attention import attention
from rpe3d.serve import prompt
from rpe3d.serve.prompt import Prompt, fault, refusal

PAGE, HEADS, GROUPS, DIM = 16, 6, 2, 32
LAWS = {
    "3d-rpe": {"chunk": 32, "window": 64, "reach": 128},
    "3d-rpe, one chunk near": {"chunk": 64, "window": 64, "reach": 128},
    "3d-rpe, not faded": {"chunk": 32, "window": 64, "reach": 128, "focus": 0, "fade": 0},
    "dca": {"chunk": 96, "window": 160},
    "dca, sharper": {"chunk": 96, "window": 160, "growth": 0.1},
    "3d-rpe-dual-chunk": {"chunk": 96, "window": 160},
}
LONG = {"dca, long chunks": {"chunk": 224, "window": 240}}
PIECES = [(0, 700), (300, 700), (511, 577), (640, 657), (0, 97), (0, 33)]


def made(name):
    return make_law(name.split(",")[0], pretrained=256, context=4096, head_dim=DIM, **(LAWS | LONG)[name])


@pytest.mark.parametrize("piece", PIECES, ids=str)
@pytest.mark.parametrize("name", LAWS)
def test_a_piece_of_a_prompt_is_as_the_specification_has_it(name, piece):
    """`attention(..., impl="reference")` on the keys in a row. Pages are shuffled, and the rest of the cache is NaN."""
    law, (first, stop) = made(name), piece
    generator = torch.Generator().manual_seed(stop + first)
    pages = torch.randperm(90, generator=generator)[: -(-stop // PAGE) + 3].int()
    cache = torch.full((90, PAGE, GROUPS, 2 * DIM), torch.nan)
    cache[pages.long()] = torch.randn(len(pages), PAGE, GROUPS, 2 * DIM, generator=generator)
    cache[pages[-3:].long()] = torch.nan
    cache[pages[-4], (stop - 1) % PAGE + 1 :] = torch.nan
    keys, values = cache.split(DIM, dim=-1)
    query = torch.randn(stop - first, HEADS, 3 * DIM, generator=generator)[..., :DIM]
    out = torch.full((stop - first, HEADS, DIM), torch.nan)
    Prompt(law, range(first, stop), pages, PAGE, flash, processors=4)(query, keys, values, out, DIM**-0.5)
    k, v = (x[pages.long()].flatten(0, 1)[:stop].transpose(0, 1)[None].double() for x in (keys, values))
    q = query.transpose(0, 1)[None].double()
    true, _ = attention(q, k, v, law, query_positions=range(first, stop), key_positions=range(stop), rotated=True,
                        impl="reference")  # fmt: skip
    torch.testing.assert_close(out.double(), true[0].transpose(0, 1), atol=2e-5, rtol=0)


def test_what_calls_cannot_run_is_refused():
    own = {"pretrained": 256, "context": 4096, "head_dim": DIM}
    assert refusal(made("3d-rpe"), PAGE) is None
    assert "chooses" in refusal(make_law("3d-rpe", far=8, **own), PAGE)
    assert "pages" in refusal(make_law("3d-rpe", chunk=24, window=48, reach=128, **own), PAGE)
    assert "keys of its own" in refusal(make_law("3d-rpe", sinks=1, **own), PAGE)
    assert "chunks" in refusal(make_law("rerope", **own), PAGE)
    assert "chunks" in refusal(make_law("self-extend", **own), PAGE)
    assert "sharpened" in refusal(make_law("3d-rpe", rotary_dim=24, **own), PAGE)
    assert refusal(make_law("3d-rpe", rotary_dim=24, focus=0, fade=0, **own), PAGE) is None
    assert "too large" in refusal(make_law("3d-rpe", **own | {"head_dim": 512}), PAGE)
    assert "32 bits" in refusal(made("3d-rpe"), PAGE, rows=2**16, keys=2**20)
    assert refusal(made("3d-rpe"), PAGE, rows=2**15, keys=2**20) is None
    with pytest.raises(ConfigError, match="not whole pages of 24"):
        Prompt(made("3d-rpe"), range(700), torch.arange(30), 24, flash, processors=4)


@pytest.mark.parametrize(("count", "expected"), [(600, {1}), (20, {0})])
def test_keys_are_divided_among_programs_where_rows_do_not_fill_the_gpu(count, expected):
    """A tile has 192 rows of 3 heads here: 600 queries in chunks of 32 are 2 x 19 of them, and 20 are 2."""
    seen = set()

    def calls(*vectors, **given):
        seen.add(given["num_splits"])
        return flash(*vectors, **given)

    cache, query = torch.randn(2, 50, PAGE, GROUPS, DIM), torch.randn(count, HEADS, DIM)
    piece = Prompt(made("3d-rpe"), range(800 - count, 800), torch.arange(50).int(), PAGE, calls, processors=40)
    piece(query, *cache, torch.empty_like(query), DIM**-0.5)
    assert seen == expected


@pytest.fixture(autouse=True)
def faster(request, monkeypatch):
    """Let the specification compute all queries of a head at once, in all tests but one."""
    if "sparing" not in request.node.name:
        monkeypatch.setattr(prompt, "FEW", 1024)


def test_a_trial_that_is_sparing_of_memory_finds_the_same():
    assert tried("3d-rpe", flash) is None
    assert "off by" in tried("3d-rpe", first)


def tried(name, calls, dtype=torch.float32):
    return fault(made(name), PAGE, heads=HEADS, groups=GROUPS, dtype=dtype, device=torch.device("cpu"), flash=calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAWS)
def test_right_calls_pass_the_trial(name, dtype):
    assert tried(name, flash, dtype) is None


def base_two(*vectors, **given):
    out, lse = flash(*vectors, **given)
    return out, lse / math.log(2)


def shifted(*vectors, **given):
    """A causal mask that lets no query see itself."""
    return flash(*vectors, **given | {"seqused_k": given["seqused_k"] - int(given["causal"])})


def in_order(*vectors, **given):
    """Pages as they lie, whatever the table says."""
    table = given["block_table"]
    return flash(*vectors, **given | {"block_table": torch.arange(table.shape[1]).int().expand_as(table)})


def by_token(*vectors, **given):
    """A log-sum-exp [total, heads], in that order of memory."""
    out, lse = flash(*vectors, **given)
    return out, lse.T.contiguous().view(lse.shape)


def all_keys(*vectors, **given):
    """Lengths of sequences are not looked at."""
    most = torch.full_like(given["seqused_k"], given["max_seqlen_k"])
    return flash(*vectors, **given | {"seqused_k": most})


def split(*vectors, **given):
    """Right without splits; gathered keys that are split count twice."""
    out, lse = flash(*vectors, **given)
    return out, lse + math.log(2) * (given["num_splits"] == 2 and len(vectors[1]) == 1)


def few(*vectors, **given):
    """Right from a tile on."""
    out, lse = flash(*vectors, **given)
    return out * (1 if given["max_seqlen_q"] > 20 else 1.5), lse


def first(*vectors, **given):
    """Right for the first sequence of gathered keys."""
    out, lse = flash(*vectors, **given)
    if len(vectors[1]) == 1:
        out[given["cu_seqlens_q"][1] :] *= 1.5
    return out, lse


def refusing(*vectors, **given):
    raise RuntimeError("page size must be divisible by 128\nbacktrace")


def empty(*vectors, **given):
    raise torch.OutOfMemoryError("no memory is left")


@pytest.mark.parametrize(
    "wrong", [base_two, shifted, in_order, by_token, all_keys, split, few, first], ids=lambda wrong: wrong.__name__
)
@pytest.mark.parametrize("name", ["3d-rpe", "dca, long chunks"])
def test_a_trial_finds_wrong_calls(name, wrong):
    assert "off by" in tried(name, wrong, torch.bfloat16)


def test_a_call_that_a_library_refuses_is_told_in_one_line():
    assert tried("3d-rpe", refusing) == "RuntimeError: page size must be divisible by 128"
    assert tried("3d-rpe", empty) == "OutOfMemoryError: no memory is left"


def test_a_trial_that_would_take_much_memory_is_not_made():
    law = make_law("dca", pretrained=2**18, context=2**20, head_dim=DIM, chunk=2**17, window=2**17 + 2**16)
    shape = {"heads": HEADS, "groups": GROUPS, "dtype": torch.float32, "device": torch.device("cpu")}
    assert "more than 131072" in fault(law, PAGE, **shape, flash=flash)
