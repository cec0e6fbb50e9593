"""What only the decoding step in plain PyTorch does: any law and type, on the CPU's attention or by products."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rpe3d import make_law
from rpe3d.attention import attention, explain, reference
from rpe3d.attention.decode import plain as decode_plain
from rpe3d.config import ConfigError
from rpe3d.geometry import LAWS
from rpe3d.testing import SMALL, random_problem, small_law


def problem(law, **options):
    return random_problem(law, **{"s": 220, "dtype": torch.float64} | options)


def step(x):
    return decode_plain.Step(x)(x.q, x.k, x.v, x.sinks)


def assert_is_reference(x):
    for ours, truth in zip(step(x), reference.attend(x), strict=True):
        assert ours.dtype == truth.dtype
        torch.testing.assert_close(ours, truth, rtol=0, atol=1e-13)


@pytest.mark.parametrize("t", [1, 3, 16])
@pytest.mark.parametrize("name", LAWS)
def test_every_law_is_the_reference_in_float64(name, t):
    assert_is_reference(problem(small_law(name), b=2, t=t))


@pytest.mark.parametrize("options", [{"softcap": 4.0}, {"e": 40}, {"softcap": 4.0, "e": 40}])
@pytest.mark.parametrize("name", ["3d-rpe", "self-extend", "streaming-llm"])
def test_products_take_what_the_library_does_not(name, options):
    assert_is_reference(problem(small_law(name), t=3, sinks=torch.linspace(-5, 9, 6), scale=0.3, **options))


@pytest.mark.parametrize("t", [1, 2])
@pytest.mark.parametrize("chunk", [600, 1100])
def test_rows_that_see_only_the_end_of_a_long_piece_are_right(chunk, t):
    """The library reads 512 keys at a time; a row may see none of the first."""
    law = make_law("3d-rpe", pretrained=8192, context=65536, head_dim=64, chunk=chunk, window=chunk)
    border = 4 * chunk
    queries = range(border - t + 1, border + 1)
    assert_is_reference(problem(law, t=t, s=border + 1, query_positions=queries, key_positions=range(border + 1)))


@pytest.mark.parametrize("keys", [range(7, 227), range(16, 236), range(15, 235)])
def test_keys_may_begin_within_a_chunk(keys):
    x = problem(small_law("3d-rpe"), t=2, query_positions=range(keys.stop - 2, keys.stop), key_positions=keys)
    assert_is_reference(x)


def test_chunks_shorter_than_the_rows_are_turned_themselves():
    for chunk in (2, 8):
        assert_is_reference(problem(small_law("3d-rpe", chunk=chunk, sinks=2), t=5))


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_vectors_may_be_strided_in_the_head_dimension(which):
    """PyTorch's CPU attention takes such vectors and reads them wrongly."""
    x = problem(small_law("3d-rpe"), t=2)
    assert_is_reference(replace(x, **{which: getattr(x, which).mT.contiguous().mT}))


def test_queries_may_stand_apart_but_not_fall():
    x = problem(small_law("3d-rpe"), t=3, query_positions=torch.tensor([[30, 90, 219]]))
    assert_is_reference(x)
    with pytest.raises(ConfigError, match="query_positions fall from 90 to 30"):
        step(replace(x, queries=torch.tensor([[30, 90, 30]])))


def test_keys_that_are_not_consecutive_are_left_to_the_reference():
    keys = torch.arange(220)
    keys[50:] += 1
    x = problem(small_law("3d-rpe"), query_positions=torch.tensor([220]), key_positions=keys)
    assert explain(x) == ("reference", "few queries, but no decoding step: its key positions are not consecutive")


def test_it_is_what_a_cpu_decodes_with():
    x = problem(small_law("3d-rpe"), dtype=torch.float32)
    assert explain(x) == ("decode", "few queries: plain PyTorch (the kernel: it runs on a GPU, not on cpu)")
    for impl in ("auto", "decode"):
        ours = attention(x.q, x.k, x.v, x.law, rotated=True, impl=impl)
        for a, b in zip(ours, step(x), strict=True):
            assert torch.equal(a, b)


def test_sequences_alike_are_one_part_and_a_mask_of_ones_is_none():
    mask = torch.ones(3, 220, dtype=torch.bool)
    keys, queries = torch.arange(220).expand(3, 220), torch.full((3, 1), 219)
    x = problem(small_law("3d-rpe"), b=3, query_positions=queries, key_positions=keys, key_mask=mask)
    assert len(decode_plain.Step(x).parts) == 1
    assert_is_reference(x)
    padded = replace(x, key_mask=mask.index_fill(1, torch.arange(9), False) | torch.tensor([[True], [False], [True]]))
    assert len(decode_plain.Step(padded).parts) == 3
    assert_is_reference(padded)


@pytest.mark.parametrize("name", ["rope", "3d-rpe", "dca", "streaming-llm"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_cache_is_neither_copied_nor_turned(name, softcap):
    """Nothing that a step makes has a fourth of the elements of the keys; nor is an angle made in it."""

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **kwargs or {})
            if not function.is_view and isinstance(out, torch.Tensor):
                sizes.append(out.numel())
            assert function.overloadpacket not in (torch.ops.aten.cos, torch.ops.aten.sin)
            return out

    sizes = []
    law = make_law(name, pretrained=8192, context=65536, head_dim=64)
    x = problem(law, b=2, h=4, s=8192, dtype=torch.float32, softcap=softcap)
    made = decode_plain.Step(x)
    with Record():
        made(x.q, x.k, x.v, None)
    assert sizes
    assert max(sizes) < x.k.numel() / 4


@pytest.mark.parametrize("name", ["3d-rpe", "dca", "self-extend", "streaming-llm"])
def test_a_model_s_decoding_is_its_full_forward(name, monkeypatch):
    """Tokens one by one and several at a time after a prompt of several chunks, in a padded batch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import rpe3d

    config = LlamaConfig(
        vocab_size=60,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    model = rpe3d.extend(LlamaForCausalLM(config).double().eval(), name, context=230, **SMALL.get(name, {}))
    calls, plain = [], decode_plain.Step.__call__
    monkeypatch.setattr(decode_plain.Step, "__call__", lambda self, *x: calls.append(self) or plain(self, *x))
    text = torch.randint(60, (2, 205))
    mask = torch.ones(2, 205, dtype=torch.long)
    mask[1, :30] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        full = model(text, attention_mask=mask, position_ids=positions).logits
        assert not calls
        cache, parts, start = None, [], 0
        for end in (190, 191, 192, 195, 204, 205):
            now = slice(start, end)
            out = model(
                text[:, now],
                attention_mask=mask[:, :end],
                position_ids=positions[:, now],
                past_key_values=cache,
                use_cache=True,
            )
            cache, start = out.past_key_values, end
            parts.append(out.logits)
    assert len(calls) == 10
    assert len(set(calls)) == 5  # the layers of a forward share a step
    live = mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[live], full[live], rtol=0, atol=1e-10)
