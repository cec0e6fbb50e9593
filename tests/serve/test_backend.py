"""The parts of the backends, without an engine; and the one for CUDA, as far as a CPU can run it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-serve` has it")

from rpe3d import ConfigError, make_law
from rpe3d.attention import attention
from rpe3d.serve import cpu, cuda, plugin
from rpe3d.serve.backend import Batch, Far, split


def law(name="3d-rpe", **parameters):
    return make_law(name, pretrained=64, context=512, head_dim=32, **parameters)


@dataclass
class Common:
    """What is read of vLLM's CommonAttentionMetadata."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    positions: object = None
    is_prefilling: object = None
    seq_lens_cpu_upper_bound: object = None
    req_idx: object = None
    _num_computed_tokens_cache: object = None
    _token_to_req_indices_cache: object = None


def test_a_batch_is_split_by_length():
    starts = torch.tensor([0, 2, 3, 3, 7], dtype=torch.int32)
    common = Common(starts, starts, torch.tensor([10, 40, 0, 30]), 4, 7, 4, 40, torch.arange(8).view(4, 2),
                    torch.arange(100, 107))  # fmt: skip
    batch = split(common, 24, lambda near: near)
    assert [(far.tokens, far.length, far.row) for far in batch.far] == [(slice(2, 3), 40, 1), (slice(3, 7), 30, 3)]
    assert batch.near_tokens.tolist() == [0, 1]
    near = batch.near
    assert (near.num_reqs, near.num_actual_tokens, near.max_query_len, near.max_seq_len) == (1, 2, 2, 10)
    assert near.query_start_loc.tolist() == [0, 2]
    assert near.block_table_tensor.tolist() == [[0, 1]]
    assert near.slot_mapping.tolist() == [100, 101]
    assert split(common, 40, lambda near: near) is None
    assert split(common, 5, lambda near: near).near is None


@pytest.mark.parametrize("layout", ["plain", "transposed", "shuffled"])
def test_a_page_is_read_however_it_is_laid_out(layout):
    page, dim = 8, 16
    number = torch.arange(page * dim)
    held = {"plain": number, "transposed": number.view(page, dim).T.flatten()}.get(layout)
    held = torch.randperm(page * dim) if held is None else held
    x = torch.randn(2, 3, page, dim)
    assert cpu._reader(held, page, dim)(x.flatten(2)[..., held]).equal(x)


def test_a_page_that_loses_numbers_is_refused():
    with pytest.raises(ConfigError, match="in a way that is not known"):
        cpu._reader(torch.zeros(128, dtype=torch.long), 8, 16)


def test_registering_again_changes_nothing():
    from vllm.model_executor.layers import rotary_embedding
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    plugin.register()
    once = rotary_embedding.get_rope
    plugin.register()
    assert rotary_embedding.get_rope is once
    assert AttentionBackendEnum.CPU_ATTN.get_class() is cpu.Backend
    assert AttentionBackendEnum.FLASH_ATTN.get_class() is cuda.Backend


@pytest.mark.parametrize("name", ["3d-rpe", "leaky-rerope"])
def test_the_backend_for_cuda_reads_pages_as_vllm_writes_them(name):
    """A decoding step through the kernel over pages (in Triton's interpreter) beside a piece of a prompt."""
    made = law(name, **({"chunk": 16, "window": 32} if name == "3d-rpe" else {}))
    page, g, h, d = 16, 2, 4, 32
    impl = object.__new__(cuda.Impl)
    impl.law, impl.scale, impl.head_size = made, 0.2, d
    lengths, counts = [100, 75], [1, 20]
    k, v = torch.randn(2, g, 112, d), torch.randn(2, g, 112, d)
    table = torch.randperm(14).view(2, 7).int()
    cache = torch.empty(14, g, page, 2 * d)
    cache[table.long(), ..., :d] = k.unflatten(2, (7, page)).transpose(1, 2)
    cache[table.long(), ..., d:] = v.unflatten(2, (7, page)).transpose(1, 2)
    query, output = torch.randn(21, h, d), torch.empty(21, h, d)
    places = [slice(0, 1), slice(1, 21)]
    far = [Far(place, n, table[row], row) for row, (place, n) in enumerate(zip(places, lengths, strict=True))]
    batch = Batch(far, None, torch.zeros(0, dtype=torch.long), torch.tensor(lengths, dtype=torch.int32), table)
    impl.attend_far(None, query, cache, batch, output)
    for row, (place, n, t) in enumerate(zip(places, lengths, counts, strict=True)):
        q = query[place].transpose(0, 1)[None]
        given = {"scale": 0.2, "rotated": True, "query_positions": range(n - t, n), "key_positions": range(n)}
        truth, _ = attention(q, k[row, None, :, :n], v[row, None, :, :n], made, impl="reference", **given)
        torch.testing.assert_close(output[place], truth[0].transpose(0, 1), rtol=0, atol=2e-5)
