"""Rotation against oracles from outside: complex arithmetic, and the functions of Hugging Face's models."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as cohere_rotary
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotary

from rpe3d.config import ConfigError
from rpe3d.rotation import available, cos_sin, reference, rotate

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
PAIRS = pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
# batch, query heads, key heads, tokens, head dim, pairs that turn
SHAPES = pytest.mark.parametrize(
    ("b", "hq", "hk", "t", "d", "pairs"),
    [
        (1, 4, 4, 1, 64, 32),
        (2, 6, 2, 3, 80, 40),
        (1, 8, 1, 17, 96, 48),
        (1, 5, 5, 63, 128, 64),
        (2, 3, 1, 17, 80, 16),
        (1, 2, 1, 3, 256, 32),
        (1, 1, 1, 17, 12, 3),
    ],
    ids=lambda value: str(value),
)


def vectors(b, h, t, d, *, dtype=torch.float32, device="cpu", transposed=True) -> Tensor:
    """Random heads, in memory as Hugging Face makes them ([b, t, h, d], seen transposed) or contiguous."""
    x = torch.randn(b, t, h, d, device=device).transpose(1, 2)
    return (x if transposed else x.contiguous()).to(dtype)


def angles_for(*shape: int, device="cpu") -> Tensor:
    """Angles as long contexts have them: from 0 to 100,000 radians."""
    return torch.rand(shape, dtype=torch.float64, device=device) * 1e5


def truth(x: Tensor, angles: Tensor, interleaved: bool, sign: int = 1) -> Tensor:
    """RoFormer (arXiv 2104.09864) section 3.2.1: (x₁ + i x₂) e^{i angle}, in complex128."""
    pairs = angles.shape[-1]
    wide = x.detach().double()
    if interleaved:
        first, second = wide[..., 0 : 2 * pairs : 2], wide[..., 1 : 2 * pairs : 2]
    else:
        first, second = wide[..., :pairs], wide[..., pairs : 2 * pairs]
    turned = torch.complex(first, second) * torch.exp(1j * sign * angles).unsqueeze(-3)
    out = wide.clone()
    if interleaved:
        out[..., 0 : 2 * pairs : 2], out[..., 1 : 2 * pairs : 2] = turned.real, turned.imag
    else:
        out[..., :pairs], out[..., pairs : 2 * pairs] = turned.real, turned.imag
    return out


def hugging_face(q: Tensor, k: Tensor, angles: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The family's own function, fed as its model does: the table in the model's type, one entry per dimension."""
    pairs = angles.shape[-1]
    angles = angles if angles.dim() == 3 else angles[None]
    emb = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    apply = cohere_rotary if interleaved else llama_rotary
    turned = apply(q[..., : 2 * pairs], k[..., : 2 * pairs], emb.cos().to(q.dtype), emb.sin().to(q.dtype))
    return tuple(torch.cat((y, x[..., 2 * pairs :]), -1) for x, y in zip((q, k), turned, strict=True))


def assert_as_good(ours: Tensor, eager: Tensor, exact: Tensor) -> None:
    """Error <= 2 x (eager error + rounding), where rounding is that of the truth in this type."""
    error, eager_error = (ours.double() - exact).abs().max(), (eager.double() - exact).abs().max()
    rounding = (exact.to(ours.dtype).double() - exact).abs().max()
    assert error <= 2 * (eager_error + rounding), f"{error:.3g} > 2 ({eager_error:.3g} + {rounding:.3g})"


@PAIRS
@SHAPES
def test_the_reference_multiplies_by_a_unit_complex_number(b, hq, hk, t, d, pairs, interleaved):
    """RoFormer (arXiv 2104.09864) section 3.2.1. Float64: a product and a sum, each off by half an ulp."""
    q, angles = vectors(b, hq, t, d, dtype=torch.float64), angles_for(b, t, pairs)
    cos, sin = cos_sin(angles, dtype=torch.float64)
    ours, none = rotate(q, None, cos, sin, interleaved=interleaved, impl="reference")
    exact = truth(q, angles, interleaved)
    assert none is None
    assert (ours - exact).abs().max() <= 4 * torch.finfo(torch.float64).eps * exact.abs().max()


@PAIRS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_reference_equals_hugging_face_bit_for_bit(dtype, interleaved):
    """transformers' llama (half-split) and cohere (interleaved; it computes in float32 whatever it is given)."""
    dtype = torch.float32 if interleaved else dtype
    q, k, angles = vectors(2, 4, 9, 64, dtype=dtype), vectors(2, 2, 9, 64, dtype=dtype), angles_for(2, 9, 32)
    ours = rotate(q, k, *cos_sin(angles, dtype=dtype), interleaved=interleaved, impl="reference")
    for mine, theirs in zip(ours, hugging_face(q, k, angles, interleaved), strict=True):
        assert torch.equal(mine, theirs)


@PAIRS
def test_the_reference_passes_gradcheck(interleaved):
    """torch.autograd.gradcheck, float64, partial rotary and grouped heads."""
    q, k = (vectors(1, h, 3, 10, dtype=torch.float64).requires_grad_() for h in (2, 1))
    cos, sin = cos_sin(angles_for(3, 4), dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda q, k: reference.rotate(q, k, cos, sin, interleaved=interleaved), (q, k), fast_mode=False
    )


def test_the_table_holds_long_positions_to_the_last_bit():
    """cos and sin of Python's float, rounded once: a float32 product p θ is off by 0.03 rad at p = 2^20 already."""
    angles = torch.arange(2**20, 2**20 + 50, dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(0, 1, 0.25))
    cos, sin = cos_sin(angles.double(), scaling=1.5)
    for table, function in ((cos, math.cos), (sin, math.sin)):
        exact = [[1.5 * function(a) for a in row] for row in angles.tolist()]
        assert torch.equal(table, torch.tensor(exact, dtype=torch.float64).float())


def test_neighbouring_tokens_turn_differently_in_bfloat16():
    """rotary-embedding-torch makes positions in bf16, where 256 and 257 are one number."""
    q = torch.ones(1, 1, 2, 2, dtype=torch.bfloat16)
    turned, _ = rotate(q, None, *cos_sin(torch.tensor([[256.0], [257.0]], dtype=torch.float64)))
    assert not torch.equal(turned[:, :, 0], turned[:, :, 1])


@needs_triton
@PAIRS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@SHAPES
def test_the_kernel_is_as_good_as_eager(b, hq, hk, t, d, pairs, dtype, interleaved, device, poisoned):
    """At most twice the eager error, both ways; the backward's truth is the conjugate rotation of the gradient."""
    transposed = t != 17
    q, k = (vectors(b, h, t, d, dtype=dtype, device=device, transposed=transposed) for h in (hq, hk))
    angles = angles_for(b, t, pairs, device=device) if b > 1 else angles_for(t, pairs, device=device)
    grads = tuple(torch.randn_like(x) for x in (q, k))
    q.requires_grad_(), k.requires_grad_()
    ours = rotate(q, k, *cos_sin(angles), interleaved=interleaved, impl="triton")
    eager = hugging_face(q, k, angles, interleaved)
    ours_grads, eager_grads = (torch.autograd.grad(out, (q, k), grads) for out in (ours, eager))
    for i, x in enumerate((q, k)):
        assert ours[i].dtype == dtype
        assert ours[i].stride() == x.stride()
        assert_as_good(ours[i], eager[i], truth(x, angles, interleaved))
        assert_as_good(ours_grads[i], eager_grads[i], truth(grads[i], angles, interleaved, sign=-1))


@needs_triton
@PAIRS
def test_the_backward_of_the_kernel_is_the_autograd_of_the_reference(interleaved, device, poisoned):
    """Float32: both do two products and a sum per element, so they differ by roundings of the largest element."""
    q, k = (vectors(2, h, 5, 48, device=device).requires_grad_() for h in (6, 2))
    table = cos_sin(angles_for(5, 16, device=device), scaling=1.25)
    weights = [torch.randn_like(x) for x in (q, k)]
    got, expected = (
        torch.autograd.grad(rotate(q, k, *table, interleaved=interleaved, impl=impl), (q, k), weights)
        for impl in ("triton", "reference")
    )
    for mine, theirs, weight in zip(got, expected, weights, strict=True):
        assert (mine - theirs).abs().max() <= 4 * torch.finfo(torch.float32).eps * 1.25 * weight.abs().max()


@needs_triton
@PAIRS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dimensions_beyond_the_pairs_pass_through_bit_for_bit(dtype, interleaved, device, poisoned):
    """Infinities and NaN too: nothing is computed on them, and they do not reach the dimensions that turn."""
    q, k = (vectors(1, h, 5, 80, dtype=dtype, device=device) for h in (3, 1))
    q[..., 32], q[..., 79], k[..., 40] = torch.nan, torch.inf, -torch.inf
    table = cos_sin(angles_for(5, 16, device=device))
    for impl in ("reference", "triton"):
        turned = rotate(q, k, *table, interleaved=interleaved, impl=impl)
        for x, y in zip((q, k), turned, strict=True):
            assert torch.equal(x[..., 32:].contiguous().view(torch.uint8), y[..., 32:].contiguous().view(torch.uint8))
            assert y[..., :32].isfinite().all()


@needs_triton
@PAIRS
def test_the_kernel_takes_any_strides(interleaved, device, poisoned):
    """Slices of a packed projection, every other dimension of a head, unlike tables, expanded and sliding views."""
    packed = torch.randn(2, 7, 5, 64, device=device)
    q, k = packed[:, :, :3].transpose(1, 2), packed[:, :, 3:].transpose(1, 2)[..., ::2]
    cos, sin = cos_sin(angles_for(1, 7, 8, device=device))
    for q_, k_, cos_, sin_ in (
        (q, q[:, :1], cos, sin),
        (k, k[:, 1:], cos[0], sin[0].T.contiguous().T),
        (q, k.repeat_interleave(2, -1), cos, torch.cat((sin, sin), -1)[..., :8]),
        (q.expand(2, 3, 7, 64), q[:, :1].expand(2, 4, 7, 64), cos.expand(2, 7, 8), sin.expand(2, 7, 8)),
        (q.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0), q, cos, sin),
        (packed.flatten().unfold(0, 64, 1)[None, None, :7], q[:1], cos, sin),
    ):
        ours = rotate(q_, k_, cos_, sin_, interleaved=interleaved, impl="triton")
        expected = rotate(q_, k_, cos_, sin_, interleaved=interleaved, impl="reference")
        for mine, theirs in zip(ours, expected, strict=True):
            assert (mine - theirs).abs().max() <= 4 * torch.finfo(torch.float32).eps * theirs.abs().max()


@needs_triton
@pytest.mark.parametrize(
    ("shape", "stride"),
    [((3, 1, 1, 64), (2**30, 64, 64, 1)), ((1, 5, 1, 64), (64, 2**29, 64, 1)), ((1, 1, 17, 64), (64, 64, 2**27, 1))],
    ids=["batch", "heads", "tokens"],
)
def test_offsets_beyond_two_to_the_31_elements_are_right(shape, stride, device):
    """Contiguous heads of a million tokens: h x stride passes int32. Untouched memory costs nothing on a CPU."""
    q = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=device).as_strided(shape, stride)
    q.copy_(torch.randn(shape))
    table = cos_sin(angles_for(shape[2], 32, device=device))
    ours, expected = (rotate(q, None, *table, impl=impl)[0].float() for impl in ("triton", "reference"))
    assert (ours - expected).abs().max() <= torch.finfo(torch.bfloat16).eps * expected.abs().max()


@needs_triton
def test_every_tile_gives_the_same_bits(device, poisoned):
    """Tiles share no arithmetic between elements, so their shape cannot show in the result."""
    from rpe3d.rotation import kernel

    xs = [vectors(1, h, 9, 48, device=device) for h in (5, 2)]
    table = cos_sin(angles_for(9, 16, device=device))
    expected = kernel.launch(xs, *table)
    for block_t, block_h, num_warps in ((1, 1, 1), (2, 8, 2), (16, 2, 8)):
        got = kernel.launch(xs, *table, block_t=block_t, block_h=block_h, num_warps=num_warps)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@needs_triton
@PAIRS
def test_a_launch_settled_once_turns_each_tensor_by_its_own_table(interleaved, device, poisoned):
    from rpe3d.rotation.kernel import Turning

    for shape in ((9, 16), (2, 9, 16)):  # one table for both rows of the batch, and one for each
        tables = [cos_sin(angles_for(*shape, device=device)) for _ in range(2)]
        both = Turning(*tables, interleaved=interleaved)
        first = Turning(tables[0], interleaved=interleaved)
        for _ in range(3):
            xs = [vectors(2, h, 9, 48, device=device) for h in (5, 2)]
            pairs = zip(xs, tables, strict=True)
            expected = [rotate(x, None, *table, interleaved=interleaved, impl="triton")[0] for x, table in pairs]
            assert all(torch.equal(a, b) for a, b in zip(both(*xs), expected, strict=True))
            assert torch.equal(first(xs[0])[0], expected[0])


@needs_triton
def test_gradients_reach_only_what_asks_for_them(device, poisoned):
    """q alone, k alone, a broadcast gradient (of a sum), and a second derivative, which a linear map sends on."""
    table = cos_sin(angles_for(5, 8, device=device))
    q, k = (vectors(1, h, 5, 16, device=device).requires_grad_() for h in (2, 1))
    for used in (0, 1):
        expected = torch.autograd.grad(rotate(q, k, *table, impl="reference")[used].sum(), (q, k)[used])[0]
        got = torch.autograd.grad(rotate(q, k, *table, impl="triton")[used].sum(), (q, k), allow_unused=True)
        assert got[1 - used] is None
        torch.testing.assert_close(got[used], expected)
        frozen = [x if i == used else x.detach() for i, x in enumerate((q, k))]
        turned = rotate(*frozen, *table, impl="triton")
        got = torch.autograd.grad(turned[0].sum() + turned[1].sum(), frozen[used])
        torch.testing.assert_close(got[0], expected)
    weight, direction = torch.randn_like(q, requires_grad=True), torch.randn_like(q)
    (first,) = torch.autograd.grad(rotate(q, None, *table, impl="triton")[0], q, weight, create_graph=True)
    (second,) = torch.autograd.grad(first, weight, direction)
    torch.testing.assert_close(second, rotate(direction, None, *table, impl="reference")[0])


@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize(("b", "hq", "hk", "t"), [(0, 4, 2, 3), (2, 4, 2, 0), (1, 0, 2, 3), (1, 4, 0, 3)])
def test_nothing_turns_into_nothing(b, hq, hk, t, impl, device):
    """An empty batch, no tokens, no heads."""
    q, k = (torch.randn(b, h, t, 8, device=device, requires_grad=True) for h in (hq, hk))
    turned = rotate(q, k, *cos_sin(angles_for(t, 4, device=device)), impl=impl)
    assert (turned[0].shape, turned[1].shape) == (q.shape, k.shape)
    grads = torch.autograd.grad(turned[0].sum() + turned[1].sum(), (q, k))
    assert (grads[0].shape, grads[1].shape) == (q.shape, k.shape)


@needs_triton
@PAIRS
def test_the_operator_of_compiled_graphs_is_well_formed(interleaved, device):
    """torch.library.opcheck: schema, shapes and strides under fake tensors, and the whole under AOT dispatch."""
    from rpe3d.rotation import kernel

    xs = [vectors(1, h, 5, 16, device=device) for h in (2, 1)]
    table = cos_sin(angles_for(5, 8, device=device))
    torch.library.opcheck(kernel._operator, (xs, *table, interleaved, False))


ALONE = """
import sys, torch
if sys.argv[1] == "without":
    sys.modules["triton"] = None
from rpe3d.config import ConfigError
from rpe3d.rotation import available, cos_sin, rotate
assert sys.modules.get("triton") is None, "importing rpe3d.rotation imports triton"
device = "cuda" if torch.cuda.is_available() else "cpu"
q, k = (torch.randn(1, 6, h, 16, device=device).transpose(1, 2).requires_grad_() for h in (2, 1))
table = cos_sin(torch.rand(6, 8, dtype=torch.float64, device=device))
expected = rotate(q, k, *table, impl="reference")
if sys.argv[1] == "without":
    assert available("cuda") == "reference"
    assert torch.equal(rotate(q, k, *table)[0], expected[0])
    try:
        rotate(q, k, *table, impl="triton")
    except ConfigError as error:
        print(error)
else:
    for dynamic in (False, True):
        compiled = torch.compile(rotate, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        turned = compiled(q, k, *table, impl="triton")
        torch.testing.assert_close(turned, expected)
        got, wanted = (torch.autograd.grad(out, (q, k), (q, k), retain_graph=True) for out in (turned, expected))
        torch.testing.assert_close(got, wanted)
    print("compiled")
"""


@pytest.mark.parametrize(
    ("triton", "says"), [("without", "Triton is not installed"), pytest.param("with", "compiled", marks=needs_triton)]
)
def test_it_works_without_triton_and_compiles_to_one_graph_with_it(triton, says):
    """In a process of its own: without this one's imports, and without the type checks that no graph can hold."""
    command = [sys.executable, "-W", "ignore", "-c", ALONE, triton]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


def test_auto_is_the_kernel_on_a_gpu_and_the_reference_elsewhere():
    """`available` is what impl="auto" chooses; float64 is beyond the kernel."""
    assert available("cpu") == "reference"
    assert available("cuda", torch.float64) == "reference"
    assert available("cuda") == ("triton" if find_spec("triton") else "reference")


GOOD = {"q": (2, 4, 5, 16), "k": (2, 2, 5, 16), "cos": (5, 8), "sin": (5, 8)}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q": (4, 5, 16)}, "q has shape"),
        ({"k": (2, 5, 16)}, "k has shape"),
        ({"q": torch.int64}, "q is torch.int64"),
        ({"k": torch.float8_e4m3fn}, "k is torch.float8_e4m3fn"),
        ({"k": (3, 2, 5, 16)}, "k has batch 3 but q has 2"),
        ({"k": (2, 2, 6, 16)}, "k has tokens 6 but q has 5"),
        ({"k": (2, 2, 5, 32)}, "k has head dim 32 but q has 16"),
        ({"k": torch.bfloat16}, "k is torch.bfloat16 on cpu but q is torch.float32"),
        ({"k": torch.device("meta")}, "k is torch.float32 on meta"),
        ({"sin": (2, 5, 8)}, "cos is torch.float32 [5, 8] but sin"),
        ({"sin": torch.float64}, "sin is torch.float64"),
        ({"cos": (8,), "sin": (8,)}, "cos has shape [8]"),
        ({"cos": (2, 1, 5, 8)}, "cos has shape [2, 1, 5, 8]"),
        ({"cos": torch.bfloat16}, "cos is torch.bfloat16"),
        ({"cos": torch.device("meta")}, "cos is on meta but q is on cpu"),
        ({"cos": (6, 8), "sin": (6, 8)}, "cos has 6 tokens but q has 5"),
        ({"cos": (3, 5, 8), "sin": (3, 5, 8)}, "cos has batch 3 but q has 2"),
        ({"cos": (5, 16), "sin": (5, 16)}, "cos has 16 pairs, outside [1, 8] for head dim 16"),
        ({"cos": (5, 0), "sin": (5, 0)}, "cos has 0 pairs"),
        ({"sin": True}, "sin requires a gradient"),
        ({"impl": "Triton"}, "did you mean 'triton'?"),
        ({"impl": "cuda"}, "impl 'cuda' is not known"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_argument_is_refused_in_one_sentence(change, says):
    """One line that says the value, the rule and what to do, and never an error from inside torch."""
    arguments = {}
    for name, shape in GOOD.items():
        given = change.get(name)
        arguments[name] = torch.ones(given if isinstance(given, tuple) else shape)
        if isinstance(given, (torch.dtype, torch.device)):
            arguments[name] = arguments[name].to(given)
        elif given is True:
            arguments[name].requires_grad_()
    with pytest.raises(ConfigError) as caught:
        rotate(**arguments, impl=change.get("impl", "auto"))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_table_is_refused():
    """float32 angles have lost the position already; a bf16 table loses it here."""
    for arguments, says in (
        ({"angles": torch.ones(2, 2)}, "angles are torch.float32"),
        ({"angles": torch.ones(2, 2).double(), "dtype": torch.bfloat16}, "dtype of the table is torch.bfloat16"),
        ({"angles": torch.ones(2, 2).double(), "scaling": 0.0}, "scaling is 0.0"),
    ):
        with pytest.raises(ConfigError) as caught:
            cos_sin(**arguments)
        assert says in str(caught.value)


@needs_triton
def test_the_kernel_refuses_what_it_cannot_run(monkeypatch):
    """float64 anywhere, and a CPU tensor unless Triton interprets."""
    from rpe3d.rotation import kernel

    q, table = torch.ones(1, 1, 2, 4), cos_sin(torch.ones(2, 2).double())
    with pytest.raises(ConfigError, match="a tensor is float64"):
        rotate(q.double(), None, *table, impl="triton")
    with pytest.raises(ConfigError, match="a tensor is float64"):
        rotate(q, None, *(entry.double() for entry in table), impl="triton")
    monkeypatch.setattr(kernel, "INTERPRETED", False)
    with pytest.raises(ConfigError, match="q is on cpu"):
        rotate(q, None, *table, impl="triton")
