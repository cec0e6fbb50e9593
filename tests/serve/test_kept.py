"""A chosen far field in vLLM: pages with room for summaries, which every forward keeps up to date."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-serve` has it")

from layers import CHOSEN, DIM, GROUPS, HEADS, PAGE, Served, builder, common, spec
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, unify_kv_cache_spec_page_size
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache, customize_attention_spec

from rpe3d.serve import cuda, kept
from rpe3d.serve.backend import Batch, Step
from rpe3d.serve.rope import MADE

WIDTH = 9
EDGE = 64  # window + chunk: up to here it is plain RoPE


@pytest.fixture(scope="module")
def config(configured):
    return configured(**CHOSEN)


@pytest.fixture
def pages(config):
    """Return the pages of a layer as vLLM sizes them, after layers were made under the law."""
    law = builder(config).law
    MADE.add(law.json)
    with set_current_vllm_config(config):
        cuda.Impl(HEADS, DIM, 0.2, GROUPS, None, None, "auto")
    yield customize_attention_spec(cuda.Backend, spec())
    cuda.Backend.law = None


def test_pages_have_room_for_what_is_kept_and_vllm_counts_it(pages, config):
    """An engine's cache has as many pages as fit with that room."""
    keys = PAGE * GROUPS * 2 * DIM * 4
    assert pages.real_page_size_bytes == keys
    assert keys + GROUPS * (DIM * 2 + DIM // 2 * 4) <= pages.page_size_bytes < keys + 640
    group = KVCacheGroupSpec(["a", "b"], pages)
    config.cache_config.kv_cache_layout = KVCacheLayout.LBNHC.name
    made = get_kv_cache_config_from_groups(config, [group], 10 * pages.page_size_bytes * 2 + 5)
    assert made.num_blocks == 10
    assert made.kv_cache_tensors[0].size == 10 * 2 * pages.page_size_bytes


def test_other_layers_keep_their_pages(pages, config, configured):
    """A layer with a window; any layer under a law without a choice, or whose blocks do not divide a page."""
    windowed = SlidingWindowSpec(
        block_size=PAGE, num_kv_heads=GROUPS, head_size=DIM, dtype=torch.float32, sliding_window=32
    )
    assert customize_attention_spec(cuda.Backend, windowed) == windowed
    unified = unify_kv_cache_spec_page_size({"full": pages, "windowed": windowed})  # as vLLM does for Gemma 3
    assert {one.page_size_bytes for one in unified.values()} == {pages.page_size_bytes}
    for other in (None, builder(configured()).law, builder(configured(**CHOSEN | {"block": 32})).law):
        assert kept.with_room(other, spec(), cuda.Backend.get_supported_kernel_block_sizes(spec())) == spec()
    assert kept.with_room(cuda.Backend.law, spec(), [32]) == spec()  # vLLM would split it


def test_steps_are_captured_where_pages_have_room(pages, config):
    support = cuda.Builder.get_cudagraph_support
    assert support(config, pages) == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert support(config, spec()) == AttentionCGSupport.NEVER


class Chosen(Served):
    """A layer whose cache vLLM has allocated, to which texts are written forward by forward."""

    def __init__(self, config, monkeypatch, pages, layout, *, texts, full=True):
        super().__init__(config, monkeypatch, [0] * texts, full=full, width=WIDTH)
        with set_current_vllm_config(config):
            self.builder = cuda.Builder(pages, [], config, torch.device("cpu"))
        group = KVCacheGroupSpec(["other", "layer"], pages)
        config.cache_config.kv_cache_layout = layout.name
        number = 40
        made = get_kv_cache_config_from_groups(config, [group], number * 2 * pages.page_size_bytes)
        caches = allocate_kv_cache(made, torch.device("cpu"), layout)
        caches["other"].untyped_storage().copy_(
            torch.full((made.kv_cache_tensors[0].size,), 255, dtype=torch.uint8).untyped_storage()
        )
        self.other, self.cache = caches["other"], caches["layer"]
        self.other.fill_(7.0)
        self.free = torch.randperm(number).tolist()
        self.rows = [[] for _ in range(texts)]

    def run(self, counts, *, padding=0):
        """Write the next tokens of some texts as vLLM does, forward, and hold every row to the specification."""
        texts, numbers = list(counts), list(counts.values())
        slots = []
        for text, count in counts.items():
            for p in range(self.lengths[text], self.lengths[text] + count):
                if p % PAGE == 0:
                    self.rows[text].append(self.free.pop(0))
                page = self.rows[text][p // PAGE]
                slots.append(page * PAGE + p % PAGE)
                self.cache[page, :, p % PAGE, :DIM] = self.k[text, :, p]
                self.cache[page, :, p % PAGE, DIM:] = self.v[text, :, p]
            self.lengths[text] += count
        given = common(numbers, [self.lengths[text] for text in texts], width=WIDTH, padding=padding)
        rows = [self.rows[text] + [0] * (WIDTH - len(self.rows[text])) for text in texts] + [[0] * WIDTH] * padding
        given.block_table_tensor = torch.tensor(rows, dtype=torch.int32)
        given.slot_mapping = torch.tensor(slots + [-1] * padding)
        if padding:
            given.num_actual_tokens = len(numbers) + padding
        query = torch.randn(sum(numbers) + padding, HEADS, DIM)
        metadata = self.builder.build(0, given)
        output = self.forward(metadata, query)
        start = 0
        for text, count in counts.items():
            n, part = self.lengths[text], slice(start, start + count)
            where = {"query_positions": range(n - count, n), "key_positions": range(n)}
            truth = self.reference(query[part], self.k[text, :, :n], self.v[text, :, :n], self.law, **where)
            torch.testing.assert_close(output[part], truth, rtol=0, atol=1e-4)
            start += count
        assert (self.other == 7.0).all()  # no other layer's keys were written to
        return metadata

    def leave(self, text):
        self.free, self.rows[text], self.lengths[text] = self.rows[text] + self.free, [], 0


@pytest.mark.parametrize("layout", [KVCacheLayout.LBNHC, KVCacheLayout.LBHNC, KVCacheLayout.BLNHC])
def test_texts_are_served_as_the_specification_says(layout, config, pages, monkeypatch):
    """Pieces of prompts, whole steps with padding, decoding beside a prompt; in layouts of vLLM with whole pages."""
    made = Chosen(config, monkeypatch, pages, layout, texts=3)
    made.run({0: 50})
    made.run({0: 45, 1: 70})
    assert isinstance(made.run({0: 1, 1: 1}, padding=2).rpe3d, Step)
    batch = made.run({0: 1, 1: 1, 2: 90}).rpe3d
    assert isinstance(batch, Batch)
    assert batch.step.lengths.tolist() == [97, 72]
    for _ in range(18 if layout is KVCacheLayout.LBNHC else 2):
        made.run({1: 1, 0: 1, 2: 1})


def test_a_page_may_be_given_to_another_text_and_a_text_may_come_back(config, pages, monkeypatch):
    """Preempted, a text loses its pages and is written again. Without new summaries, what the pages hold is wrong."""
    made = Chosen(config, monkeypatch, pages, KVCacheLayout.LBNHC, texts=3)
    made.run({0: 110})
    made.run({0: 1})
    made.leave(0)
    made.run({1: 120})
    made.run({1: 1})
    made.run({0: 112})
    made.leave(1)
    made.run({0: 1, 2: 100})
    made.run({0: 1, 2: 1})
    monkeypatch.setattr(cuda.Impl, "summarize", lambda *_: None)
    made.leave(2)
    made.leave(0)
    made.run({1: 130})  # reads its keys together, as prompts do
    with pytest.raises(AssertionError):
        made.run({1: 1})


@pytest.mark.parametrize("upto", [16, 32, 48, 80])
def test_texts_may_share_pages(upto, config, pages, monkeypatch):
    """As the prefix cache has it: within the first keys, whose mean the texts do not share, and beyond."""
    made = Chosen(config, monkeypatch, pages, KVCacheLayout.LBNHC, texts=2)
    made.k[1, :, :upto], made.v[1, :, :upto] = made.k[0, :, :upto], made.v[0, :, :upto]
    made.run({0: 128})
    made.rows[1], made.lengths[1] = made.rows[0][: upto // PAGE], upto
    made.run({1: 125 - upto})
    made.run({0: 1, 1: 1})


def test_a_rehearsal_leaves_what_is_kept(config, pages, monkeypatch):
    """vLLM rehearses and captures with lengths and pages of nobody's, and slots of -1."""
    made = Chosen(config, monkeypatch, pages, KVCacheLayout.LBNHC, texts=1)
    made.run({0: 128})
    before = torch.tensor(made.cache.untyped_storage().tolist(), dtype=torch.uint8)
    given = common([1, 1], [96, 112], width=WIDTH)
    given.block_table_tensor = torch.tensor([made.rows[0] + [0]] * 2, dtype=torch.int32)
    given.slot_mapping = torch.tensor([-1, -1])
    made.forward(made.builder.build_for_cudagraph_capture(given), torch.randn(2, HEADS, DIM))
    after = torch.tensor(made.cache.untyped_storage().tolist(), dtype=torch.uint8)
    assert torch.equal(before, after)


def test_memory_of_steps_is_taken_while_vllm_measures(config, pages, monkeypatch):
    made = Chosen(config, monkeypatch, pages, KVCacheLayout.LBNHC, texts=1)
    taken = made.impl.reserve(torch.zeros(3, HEADS, DIM))
    prompt = 3 * config.model_config.max_model_len * GROUPS * DIM * 4
    assert taken.nbytes >= prompt + made.builder.steps.room.nbytes
