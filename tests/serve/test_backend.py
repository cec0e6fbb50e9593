"""The parts of the backends, without an engine; and the one for CUDA, as far as a CPU can run it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-serve` has it")

from flash import flash
from layers import CHOSEN, DIM, EDGE, GROUPS, HEADS, LAW, Served, builder, common, spec
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadataBuilder

from rpe3d import ConfigError
from rpe3d.serve import cpu, cuda, plugin
from rpe3d.serve.backend import Batch, Far, Step, split


def test_a_batch_is_split_by_length():
    batch = split(common([2, 1, 0, 4], [10, 40, 0, 30], width=2), 24, lambda near: near)
    assert [(far.tokens, far.length, far.row) for far in batch.far] == [(slice(2, 3), 40, 1), (slice(3, 7), 30, 3)]
    assert batch.near_tokens == slice(0, 2)
    near = batch.near
    assert (near.num_reqs, near.num_actual_tokens, near.max_query_len, near.max_seq_len) == (1, 2, 2, 10)
    assert near.query_start_loc.tolist() == [0, 2]
    assert near.block_table_tensor.tolist() == [[0, 1]]
    assert near.slot_mapping.tolist() == [100, 101]


def test_near_sequences_that_lie_apart_are_gathered():
    batch = split(common([1, 1, 3], [10, 40, 20], width=2), 24, lambda near: near)
    assert batch.near_tokens.tolist() == [0, 2, 3, 4]
    assert batch.near.query_start_loc.tolist() == [0, 1, 4]
    assert batch.near.seq_lens.tolist() == [10, 20]
    assert batch.near.block_table_tensor.tolist() == [[0, 1], [4, 5]]
    assert batch.near.slot_mapping.tolist() == [100, 102, 103, 104]


def test_a_batch_of_one_kind_is_not_split():
    given = common([2, 1], [10, 40])
    assert split(given, 40, lambda near: near) is None
    assert split(given, 5, lambda near: near).near is None


def test_lengths_are_read_from_the_host():
    """A tensor on the meta device holds no numbers: whoever reads from the device fails."""
    batch = split(common([2, 1], [10, 40], device="meta"), 24, lambda near: near)
    assert [far.length for far in batch.far] == [40]
    assert batch.near.max_seq_len == 10


@pytest.mark.parametrize("layout", ["plain", "transposed", "shuffled"])
def test_a_page_is_read_however_it_is_laid_out(layout):
    page, dim = 8, 16
    number = torch.arange(page * dim)
    held = {"plain": number, "transposed": number.view(page, dim).T.flatten()}.get(layout)
    held = torch.randperm(page * dim) if held is None else held
    x = torch.randn(2, 3, page, dim)
    assert cpu._reader(held, page, dim)(x.flatten(2)[..., held]).equal(x)


def test_a_page_that_loses_numbers_is_refused():
    with pytest.raises(ConfigError, match="in an unknown layout"):
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


def test_the_rotary_table_is_made_on_the_host_whatever_the_default_device(configured):
    """vLLM builds models with the GPU as the default device: Gemma 3 and Phi-3, whose table is ours, did not start."""
    from vllm.config import set_current_vllm_config

    from rpe3d import make_law
    from rpe3d.serve.rope import LawRotary

    law = make_law("3d-rpe", pretrained=64, context=512, head_dim=DIM, **LAW)
    with set_current_vllm_config(configured(**LAW)):
        expected = LawRotary(law, 512).cos_sin_cache
        with torch.device("meta"):
            made = LawRotary(law, 512).cos_sin_cache
    assert made.is_meta  # moved there in the end
    assert made.shape == expected.shape == (512, DIM)


@pytest.fixture(scope="module")
def engine_config(configured):
    return configured(**LAW)


@pytest.mark.parametrize(
    ("name", "parameters", "head_size", "expected"),
    [
        ("3d-rpe", LAW, DIM, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE),
        ("dca", {"chunk": 16, "window": 48}, DIM, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE),
        ("3d-rpe", LAW, 24, AttentionCGSupport.NEVER),
        ("3d-rpe", {"chunk": 4}, DIM, AttentionCGSupport.NEVER),
        ("leaky-rerope", {}, DIM, AttentionCGSupport.NEVER),
        ("3d-rpe", LAW | {"far": 3}, DIM, AttentionCGSupport.NEVER),
        ("3d-rpe", CHOSEN, DIM, AttentionCGSupport.NEVER),
        ("yarn", {}, DIM, FlashAttentionMetadataBuilder._cudagraph_support),
    ],
)
def test_steps_are_captured_where_a_kernel_takes_them(configured, name, parameters, head_size, expected):
    """`yarn` lives in the rotary layer alone: there attention is vLLM's.

    A chosen far field needs chunks of whole 32 tokens, and pages with room for summaries (`test_kept`).
    """
    assert cuda.Builder.get_cudagraph_support(configured(name, **parameters), spec(head_size)) == expected


def test_vllm_captures_decoding_whole_and_the_rest_in_pieces(configured):
    config = configured(**LAW).compilation_config
    config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert config.resolve_cudagraph_mode_and_sizes(support, "ours", 1) == CUDAGraphMode.FULL_AND_PIECEWISE


@pytest.mark.parametrize(
    ("full", "counts", "lengths", "expected"),
    [
        (False, [1, 1], [EDGE, 10], None),
        (False, [1, 1], [EDGE + 1, 10], Step),
        (True, [1, 1], [EDGE, 10], Step),
        (True, [1, 1], [EDGE + 1, 10], Step),
        (True, [1, 2], [EDGE + 1, 10], Batch),
        (True, [1, 2], [EDGE, 10], None),
        (True, [1, 0], [EDGE + 1, 10], Batch),
    ],
)
def test_who_attends(engine_config, full, counts, lengths, expected):
    """vLLM's kernel, ours in one launch, or both. Nothing is read from a device that holds no numbers."""
    made = builder(engine_config, full=full, device="meta").build(0, common(counts, lengths, device="meta"))
    found = getattr(made, "rpe3d", None)
    assert found is None if expected is None else type(found) is expected
    if expected is Step:
        assert found.tokens == slice(0, len(counts))
        assert made.scheduler_metadata is None


def test_sequences_that_decode_beside_a_prompt_share_a_launch(engine_config):
    made = builder(engine_config, device="meta")
    batch = made.build(0, common([1, 1, 1, 9], [60, 10, 70, 80], device="meta")).rpe3d
    assert [far.row for far in batch.far] == [3]
    assert batch.step.tokens.shape == batch.step.lengths.shape == (2,)
    assert batch.near_tokens == slice(1, 2)
    batch = made.build(0, common([1, 1, 9], [60, 70, 10], device="meta")).rpe3d
    assert batch.step.tokens == slice(0, 2)
    assert batch.far == []


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    "counts",
    [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 20], [1, 5, 1, 1, 1, 20]],
    ids=["a step", "beside a prompt", "between prompts"],
)
def test_the_backend_for_cuda_attends_as_the_specification(engine_config, monkeypatch, full, counts):
    """A step through the kernel over pages (in Triton's interpreter), beside prompts and vLLM's own kernel."""
    made = Served(engine_config, monkeypatch, [EDGE - 1, EDGE + 1, 1, 100, EDGE, 130], full=full)
    given = common(counts, made.lengths)
    given.block_table_tensor = made.table
    query = torch.randn(sum(counts), HEADS, DIM)
    made.check(query, made.forward(made.builder.build(0, given), query), counts)


def refusing(*vectors, **given):
    raise RuntimeError("such pages are not for this GPU")


@pytest.mark.parametrize("calls", [flash, refusing], ids=["right", "refused"])
def test_prompts_run_in_calls_of_flash_attention_where_a_trial_is_right(configured, monkeypatch, calls):
    """Three prompts beside a step and a prompt within plain RoPE, in two layers; else `rpe3d.attention` runs them."""
    made = Served(configured(**LAW), monkeypatch, [100, EDGE - 1, EDGE + 1, 130, 144])
    seen = []
    monkeypatch.setattr(
        cuda, "flash_attention", lambda *vectors, **given: seen.append(given) or calls(*vectors, **given)
    )
    monkeypatch.setattr(cuda.logger, "warning", lambda *words: seen.append(words))
    monkeypatch.setattr(cuda, "TRIALS", {})
    made.impl.flash = True
    counts = [40, 20, 1, 130, 17]
    given = common(counts, made.lengths)
    given.block_table_tensor = made.table
    metadata = made.builder.build(0, given)
    for layer in range(2):
        before = len(seen)
        query = torch.randn(sum(counts), HEADS, DIM)
        made.check(query, made.forward(metadata, query), counts)
        if layer:  # a call for each of the two regions, for each of three prompts; what failed is not tried again
            assert len(seen) - before == (6 if calls is flash else 0)
    told = [words[2:] for words in seen if isinstance(words, tuple)]
    assert told == ([] if calls is flash else [("3d-rpe", "RuntimeError: such pages are not for this GPU")])


def test_memory_of_the_longest_prompt_is_taken_while_vllm_measures(engine_config, monkeypatch):
    """vLLM then runs layers without metadata; what a prompt's keys and values take it would not see."""
    made = Served(engine_config, monkeypatch, [20])
    taken = made.impl.reserve(torch.zeros(3, HEADS, DIM, dtype=torch.bfloat16))
    assert taken.nbytes == 3 * engine_config.model_config.max_model_len * GROUPS * DIM * 2
    monkeypatch.setattr(FlashAttentionImpl, "forward", lambda self, *given: given[6].fill_(0))
    assert (made.forward(None, torch.randn(3, HEADS, DIM)) == 0).all()


def test_a_step_that_was_captured_serves_other_lengths(engine_config, monkeypatch):
    """A graph repeats a launch with the same arguments: what changes is what vLLM's persistent tensors hold."""
    made = Served(engine_config, monkeypatch, [1, 1, 1, 1], full=True)
    lengths, table = torch.ones(8, dtype=torch.int32), torch.zeros(8, 9, dtype=torch.int32)
    given = common([1] * 4, [1] * 4)
    given.seq_lens, given.block_table_tensor, given.max_seq_len = lengths[:4], table[:4], 512
    captured = made.builder.build_for_cudagraph_capture(given)
    query = torch.randn(4, HEADS, DIM)
    made.forward(captured, query)
    (launch,) = made.builder.steps._bound.items()
    for now in ([144, 3, EDGE + 1], [20, 129, 64], [7]):
        made.lengths = now
        lengths.zero_()
        lengths[: len(now)] = torch.tensor(now)
        table.fill_(2**30)
        table[: len(now)] = made.table[: len(now)]
        query.normal_()
        output = made.forward(captured, query)
        made.check(query, output, [1] * len(now))
        assert (output[len(now) :] == 0).all()
    assert list(made.builder.steps._bound.items()) == [launch]


def test_a_law_without_a_kernel_decodes_sequence_by_sequence(configured, monkeypatch):
    for name, parameters in (("leaky-rerope", {}), ("3d-rpe", LAW | {"far": 3, "block": 4})):
        made = Served(configured(name, **parameters), monkeypatch, [100, 5, 75])
        assert made.builder.steps is None
        counts = [1, 1, 20]
        given = common(counts, made.lengths)
        given.block_table_tensor = made.table
        query = torch.randn(sum(counts), HEADS, DIM)
        metadata = made.builder.build(0, given)
        assert all(isinstance(far, Far) for far in metadata.rpe3d.far)
        made.check(query, made.forward(metadata, query), counts)
