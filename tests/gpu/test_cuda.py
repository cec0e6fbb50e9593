"""What only a GPU can show: the libraries' calls, captured graphs, whole models. `make test-gpu` runs it, and more."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import rpe3d
from rpe3d.attention import attention, explain, reference
from rpe3d.attention.blocked.backends import BACKENDS
from rpe3d.attention.problem import check
from rpe3d.testing import assert_as_good, assert_gradients_as_good, in_float64, random_problem, small_law

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
LIBRARIES = ("cudnn", "flash", "efficient")
KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
KERNELS |= {"efficient": SDPBackend.EFFICIENT_ATTENTION}
LAWS = ("rope", "3d-rpe", "dca", "self-extend", "streaming-llm", "string", "dpe", "lampe", "logn")
DTYPES = {"cudnn": (torch.bfloat16, torch.float16), "flash": (torch.bfloat16, torch.float16)}
DTYPES |= {"efficient": (torch.bfloat16, torch.float32)}


def prompt(name, dtype, *, t=300, s=None, **options):
    return random_problem(small_law(name), "cuda", t=t, s=s or t, dtype=dtype, **options)


def blocked(x, backend):
    places = {"query_positions": x.queries, "key_positions": x.keys}
    return lambda q, k, v: attention(q, k, v, x.law, rotated=True, impl="blocked", backend=backend, **places)


def by_pytorch(kernel, q, k, v):
    """PyTorch's own causal attention by a library; in float64, which none of them takes, by its plain products."""
    k, v = (y.repeat_interleave(q.shape[1] // k.shape[1], 1) for y in (k, v))
    with sdpa_kernel(SDPBackend.MATH if q.dtype == torch.float64 else kernel):
        return (scaled_dot_product_attention(q, k, v, is_causal=True),)


def lying(x, order):
    """x with its dimensions in another order in memory."""
    inverse = sorted(range(4), key=order.__getitem__)
    return x.permute(order).contiguous().permute(inverse)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_backward_takes_no_plan_of_an_output_that_lies_otherwise(library):
    """PyTorch keeps cuDNN's plans by the layout of q, k and v alone: gradients were once forty times their size."""
    q, k, v, do = (torch.randn(2, 6, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    backend = BACKENDS[library]
    leaves = [y.double().requires_grad_() for y in (q, k, v)]
    weights = (leaves[0] @ leaves[1].mT * 0.125).masked_fill(
        torch.ones(256, 256, device="cuda").triu(1) > 0, -torch.inf
    )
    truths = torch.autograd.grad(((weights.softmax(-1) @ leaves[2]) * do.double()).sum(), leaves)
    out, lse = backend.forward(q, k, v, True, 0.125)
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 2, 3)):
        found = backend.backward(lying(do, order), q, k, v, lying(out, order), lse, True, 0.125)
        for ours, truth in zip(found, truths, strict=True):
            assert (ours.double() - truth).norm() <= 0.02 * truth.norm()


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", LAWS)
def test_library_calls_are_as_good_as_eager_forward_and_backward(name, library):
    """A type for each length: a library takes seconds to prepare for a new shape or type."""
    for dtype, t in zip(DTYPES[library], (300, 257), strict=True):
        x = prompt(name, dtype, t=t)
        solve = blocked(x, library)
        assert_as_good(x, *solve(x.q, x.k, x.v))
        assert_gradients_as_good(x, solve, plain=partial(by_pytorch, KERNELS[library]))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", ["3d-rpe", "dca"])
def test_a_batch_goes_as_heads_forward_and_backward(name, library):
    """Calls that repeat over chunks have no batch; sequences are further heads there."""
    x = prompt(name, torch.bfloat16, t=300, b=3)
    solve = blocked(x, library)
    assert_as_good(x, *solve(x.q, x.k, x.v))
    assert_gradients_as_good(x, solve, plain=partial(by_pytorch, KERNELS[library]))


@pytest.mark.parametrize("name", LAWS)
def test_prompts_by_whatever_is_chosen(name):
    """Short ones by one library call, longer ones by the kernel or by many calls; after a cache; in a padded batch."""
    for t, s in ((40, 40), (300, 300), (100, 400), (17, 350)):
        x = prompt(name, torch.bfloat16, t=t, s=s, b=2)
        places = {"query_positions": x.queries, "key_positions": x.keys}
        assert_as_good(x, *attention(x.q, x.k, x.v, x.law, rotated=True, **places))


def test_float64_is_exact_by_every_way():
    x = in_float64(prompt("3d-rpe", torch.float32))
    truth = reference.attend(x)
    for impl in ("auto", "blocked"):
        for ours, exact in zip(attention(x.q, x.k, x.v, x.law, rotated=True, impl=impl), truth, strict=True):
            torch.testing.assert_close(ours, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("t", [1, 4])
def test_a_captured_step_is_replayed_on_new_vectors(t):
    x = random_problem(small_law("3d-rpe", context=1024), "cuda", b=2, t=t, s=400, dtype=torch.bfloat16)
    places = {"query_positions": x.queries, "key_positions": x.keys}
    assert explain(x)[0] == "decode"

    def step():
        return attention(x.q, x.k, x.v, x.law, rotated=True, **places)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for _ in range(3):
        for y in (x.q, x.k, x.v):
            y.normal_()
        graph.replay()
        assert_as_good(x, out, lse)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_plain_tensors_cannot_be_looked_at_while_a_graph_is_captured():
    x = random_problem(small_law("3d-rpe", context=1024), "cuda", s=400, dtype=torch.bfloat16)
    keys = torch.arange(400, device="cuda")
    step = lambda: attention(x.q, x.k, x.v, x.law, rotated=True, query_positions=keys[-1:], key_positions=keys)  # noqa: E731
    step()
    with (
        pytest.raises(rpe3d.ConfigError, match="while a CUDA graph is being captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        step()


@pytest.fixture
def models():
    """A tiny Llama on the CPU and on the GPU, under the same law."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=97, hidden_size=128, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, pad_token_id=0, bos_token_id=1,
        eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    one = LlamaForCausalLM(config).eval()
    other = copy.deepcopy(one).cuda()
    return [rpe3d.extend(model, context=512, chunk=16, window=32, reach=64, focus=0, fade=0) for model in (one, other)]


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # static caches are compiled
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch reserves its pool of memory with one
def test_a_model_generates_on_the_gpu_what_it_generates_on_the_cpu(models):
    """Greedy, float32: dynamic and static caches, a left-padded batch, and padding between two turns."""
    ids = torch.randint(3, 97, (2, 200), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :50] = 0
    given = {"max_new_tokens": 8, "do_sample": False}
    for more in ({}, {"cache_implementation": "static"}):
        made = [m.generate(ids.to(m.device), attention_mask=mask.to(m.device), **given, **more).cpu() for m in models]
        assert torch.equal(*made)
    mask[1, 90:110] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    logits = []
    for m in models:
        there = [y.to(m.device) for y in (ids, mask, places)]
        with torch.no_grad():
            first = m(there[0][:, :199], attention_mask=there[1][:, :199], position_ids=there[2][:, :199])
            rest = {"attention_mask": there[1], "position_ids": there[2][:, 199:]}
            logits.append(m(there[0][:, 199:], past_key_values=first.past_key_values, **rest).logits.cpu())
    torch.testing.assert_close(*logits, rtol=0, atol=1e-3 * float(logits[0].abs().max()))


def test_a_training_step_has_the_gradients_of_the_cpu(models):
    ids = torch.randint(3, 97, (2, 200), generator=torch.Generator().manual_seed(1))
    found = []
    for m in models:
        m(ids.to(m.device), labels=ids.to(m.device), use_cache=False).loss.backward()
        found.append({name: p.grad.cpu() for name, p in m.named_parameters()})
    for name, ours in found[1].items():
        truth = found[0][name]
        assert (ours - truth).norm() <= 2e-3 * truth.norm() + 1e-7, name


def test_a_problem_without_its_vectors_holds_none():
    x = prompt("3d-rpe", torch.bfloat16, t=2048)
    before = torch.cuda.memory_allocated()
    hollow = x.hollow()
    x = replace(x, q=hollow.q, k=hollow.k, v=hollow.v)
    assert torch.cuda.memory_allocated() < before


CHOOSING = {"chunk": 32, "window": 64, "reach": 160, "focus": 0, "fade": 0, "far": 5, "block": 16}


def choosing_model():
    from tiny_models import make

    model = make("llama", max_position_embeddings=256, num_hidden_layers=1).cuda()
    return rpe3d.extend(model, "3d-rpe", context=4096, **CHOOSING)


def assert_mostly_close(found, truth):
    """One token in ten may have chosen another block that scores the same to rounding."""
    apart = (found - truth).abs().amax(-1).flatten() / truth.abs().max()
    assert apart.quantile(0.9) < 1e-4, apart


def test_a_model_whose_queries_choose_decodes_what_it_reads():
    """Prompt and steps by their kernels: a growing cache, pieces, a crop, another text, a reordered batch.

    In a model of one layer, where a key tells nothing of the text before it.
    """
    model = choosing_model()
    ids = torch.randint(3, 97, (2, 420), generator=torch.Generator().manual_seed(0)).cuda()
    with torch.no_grad():
        truth = model(ids).logits
        assert_mostly_close(model.cpu()(ids.cpu()).logits.cuda(), truth)
        model.cuda()
        cache = model(ids[:, :300]).past_key_values
        found = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(300, 340)]
        assert_mostly_close(torch.cat(found, 1), truth[:, 300:340])
        found = [model(ids[:, i : i + 5], past_key_values=cache).logits for i in range(340, 360, 5)]
        assert_mostly_close(torch.cat(found, 1), truth[:, 340:360])
        model(ids[:, :40].flip(1), past_key_values=cache)  # another text, thrown away
        cache.crop(-140)
        found = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(260, 290)]
        assert_mostly_close(torch.cat(found, 1), truth[:, 260:290])
        cache.reorder_cache(torch.tensor([1, 0], device="cuda"))
        found = [model(ids[:, i : i + 1].flip(0), past_key_values=cache).logits for i in range(290, 310)]
        assert_mostly_close(torch.cat(found, 1), truth[:, 290:310].flip(0))


def test_a_chosen_step_is_captured_and_replayed_on_new_keys():
    """The grid depends on the size of the cache alone, and summaries are checked against keys on the device."""
    from rpe3d.attention import Memory
    from rpe3d.attention.chosen.step import Step

    law = small_law("3d-rpe", pretrained=256, context=4096, head_dim=64, sinks=0, **CHOOSING)
    x = random_problem(law, "cuda", t=1, s=400, dtype=torch.bfloat16)
    assert explain(x) == ("decode", Step.reason)
    step, memory = Step(x), Memory()
    step(x.q, x.k, x.v, None, memory)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(x.q, x.k, x.v, None, memory)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out, lse = step(x.q, x.k, x.v, None, memory)
    for _ in range(3):
        for y in (x.q, x.k, x.v):
            y.copy_(torch.randn_like(y))
        graph.replay()
        torch.cuda.synchronize()
        fresh, fresh_lse = step(x.q, x.k, x.v, None, Memory())
        assert torch.equal(out, fresh)
        assert torch.equal(lse, fresh_lse)


@pytest.mark.parametrize("used", [False, True])
def test_a_trusted_step_is_captured_with_a_fresh_memory_and_with_a_used_one(used):
    from rpe3d.attention import Memory
    from rpe3d.attention.chosen.step import Step

    law = small_law("3d-rpe", pretrained=256, context=4096, head_dim=64, sinks=0, **CHOOSING)
    x = random_problem(law, "cuda", t=1, s=400, dtype=torch.bfloat16)
    step, memory = Step(x, trusted=True), Memory()
    truth, truth_lse = step(x.q, x.k, x.v, None, Memory())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        if used:
            step(x.q, x.k, x.v, None, memory)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out, lse = step(x.q, x.k, x.v, None, memory)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, truth)
        assert torch.equal(lse, truth_lse)


def test_a_chosen_step_over_pages_is_captured_and_replayed_at_other_lengths():
    """Summaries are made as the texts are written; a graph serves any lengths, and rows that are not in use."""
    from rpe3d.attention.chosen.paged import Steps
    from rpe3d.attention.chosen.step import Step

    law = small_law("3d-rpe", pretrained=256, context=4096, head_dim=64, sinks=0, **CHOOSING)
    x = random_problem(law, "cuda", b=10, t=1, s=400, scale=0.1, dtype=torch.bfloat16)
    (b, h, _, d), g, pages = x.q.shape, x.k.shape[1], 25
    table = torch.randperm(b * pages, device="cuda").view(b, pages).int()
    k, v = (torch.empty(b * pages, 16, g, d, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for cache, y in ((k, x.k), (v, x.v)):
        cache[table.long()] = y.transpose(1, 2).unflatten(1, (pages, 16))
    steps = Steps(law, x.q.device, sequences=b, heads=h, groups=g, longest=512, page=16)
    kept = steps.layout.empty(b * pages, g, d, x.q.device)
    for part in kept:
        part.fill_(torch.nan)
    slots = (table.long()[:, :, None] * 16 + torch.arange(16, device="cuda")).view(b, 400)
    lengths, out = torch.zeros(b, dtype=torch.int32, device="cuda"), torch.empty_like(x.q)
    for start, stop in ((0, 70), (70, 150), (150, 399), (399, 400)):
        starts = torch.arange(b + 1, dtype=torch.int32, device="cuda") * (stop - start)
        lengths.fill_(stop)
        given = {"pages": table, "starts": starts, "lengths": lengths, "slots": slots[:, start:stop].flatten()}
        steps.summarize(k, kept, most=stop - start, **given)

    def step():
        steps(x.q, k, v, out, kept, pages=table, lengths=lengths, scale=0.1)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
    for some in ([400] * b, [399, 0, 97, 96, 1, 130, 17, 400, 250, 0]):
        x.q.normal_()
        out.fill_(torch.nan)
        lengths.copy_(torch.tensor(some))
        graph.replay()
        torch.cuda.synchronize()
        found, truth = [], []
        for row, n in enumerate(some):
            one = slice(row, row + 1)
            if n == 0:
                assert (out[one] == 0).all()
                continue
            q, keys, values = x.q[one].clone(), x.k[one, :, :n], x.v[one, :, :n]
            y = check(q, keys, values, law, scale=0.1, rotated=True)
            found.append(out[one].float())
            truth.append(Step(y)(q, keys, values, None)[0].float())
        apart = (torch.cat(found) - torch.cat(truth)).abs().amax(-1)  # of each row, and head
        assert apart.flatten().quantile(0.8) < 0.02, apart  # one row in five may have chosen another block


def test_what_queries_look_for_is_found_in_heads_that_lie_far_apart():
    """Nine heads of 2^28 numbers each, as 1,048,576 tokens of dimension 256 are: the last begins at 2^31."""
    from rpe3d.attention.chosen.select import Selection

    law = small_law("3d-rpe", pretrained=256, context=4096, head_dim=64, sinks=0, **CHOOSING)
    x = random_problem(law, "cuda", h=9, g=1, t=40, s=400, dtype=torch.bfloat16)
    room = torch.empty(2**31 + 40 * 64, dtype=torch.bfloat16, device="cuda")
    apart = room.as_strided(x.q.shape, (2**31, 2**28, 64, 1)).copy_(x.q)
    selection = Selection(law, 16, x.q.device)
    _, centre = selection.summaries(x.k, 4)
    one, other = (selection.aims(q, x.k, centre, range(360, 400), start=360) for q in (x.q, apart))
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("own", "context", "options", "share"),
    [
        ({}, 4096, {"t": 500, "s": 500}, 0.99),
        ({"block": 4, "far": 24}, 2**20, {"h": 4, "g": 2, "t": 77, "s": 140_000}, 0.95),
    ],
)
def test_a_prompt_whose_queries_choose_goes_through_kernels(own, context, options, share):
    """The second has more blocks than 16 bits count, as half a million tokens have in blocks of 16: longer lists.

    A few rows may have chosen another block that scores the same to rounding.
    """
    law = small_law("3d-rpe", pretrained=256, context=context, head_dim=64, sinks=0, **CHOOSING | own)
    x = random_problem(law, "cuda", dtype=torch.bfloat16, **options)
    assert explain(x)[0] == "chosen"
    out, lse = attention(x.q, x.k, x.v, law, rotated=True)
    truth, truth_lse = reference.attend(in_float64(x))
    apart = (out.double() - truth).norm(dim=-1) / truth.norm(dim=-1)
    assert apart.quantile(share) < 0.02
    assert (lse.double() - truth_lse).abs().quantile(share) < 0.02


def test_a_forward_on_the_cpu_starts_the_driver_and_the_plugin_sees_it():
    """After it a fork could not use CUDA, while torch went on saying that nothing was started."""
    program = (
        "import torch, rpe3d\nfrom rpe3d.serve.fork import driver_started\nassert not driver_started()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "small = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)\n"
        "rpe3d.extend(LlamaForCausalLM(LlamaConfig(**small, vocab_size=16, max_position_embeddings=64)), context=256)\n"
        "assert not torch.cuda.is_initialized()\nprint(driver_started())\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.split()[-1:] == ["True"], done.stderr[-2000:]
