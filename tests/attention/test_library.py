"""The library's calls: the rows that fill up a short end change nothing, and a backward sees dense outputs."""

from types import SimpleNamespace

import pytest
import torch

from rpe3d.attention import blocked
from rpe3d.attention.blocked import backends as library
from rpe3d.attention.blocked.backends import BACKENDS, ROUND
from rpe3d.attention.blocked.layout import laid_out
from rpe3d.testing import random_problem, small_law


@pytest.fixture
def cudnn(monkeypatch):
    """cuDNN's operator on a CPU, with the shapes it was called with."""
    shapes = []

    def attend(q, k, v, bias, lse, dropout, causal, mask, *, scale):
        shapes.append((q.shape[2], k.shape[2]))
        score = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
        if causal:
            score = score.masked_fill(torch.ones_like(score, dtype=torch.bool).triu(1), -torch.inf)
        values = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        return score.softmax(-1) @ values, score.logsumexp(-1, keepdim=True), None

    monkeypatch.setattr(library, "aten", SimpleNamespace(_scaled_dot_product_cudnn_attention=attend))
    return shapes


@pytest.mark.parametrize(
    ("rows", "columns", "causal", "called"),
    [
        (7, 7, True, (ROUND, ROUND)),
        (ROUND + 1, ROUND + 1, True, (2 * ROUND, 2 * ROUND)),
        (7, 40, False, (ROUND, 40)),  # keys that all rows see cannot be filled up
        (7, 5, True, (7, 5)),  # a causal call with fewer keys than rows neither
        (ROUND, 40, False, (ROUND, 40)),
    ],
)
def test_a_short_end_is_filled_up_and_its_rows_are_the_same(cudnn, rows, columns, causal, called):
    q, k, v = (torch.randn(1, h, n, 8, dtype=torch.float64) for h, n in ((4, rows), (2, columns), (2, columns)))
    out, lse = BACKENDS["cudnn"].forward(q, k, v, causal, 0.3)
    truth = library.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=0.3)
    assert cudnn[0] == called
    torch.testing.assert_close(out, truth[0])
    torch.testing.assert_close(lse, truth[1][..., 0])


def views(rows):
    """Queries [2, 3, rows, 8] in several layouts: dense, heads last, cut out of more rows, heads last and cut out."""
    dense = torch.randn(2, 3, 2 * rows, 8)
    last = torch.randn(2, 2 * rows, 3, 8).transpose(1, 2)
    return [dense[:, :, :rows].contiguous(), last[:, :, :rows].clone(), dense[:, :, :rows], last[:, :, :rows]]


@pytest.mark.parametrize("q", range(4))
@pytest.mark.parametrize("x", range(4))
def test_what_a_backward_sees_lies_as_an_output_of_the_forward_does(q, x):
    """cuDNN's plans are kept by q, k and v; PyTorch's own output for a q is `empty_like(q)`."""
    q, x = views(5)[q], views(5)[x]
    laid = laid_out(x, q)
    assert laid.stride() == torch.empty_like(q).stride()
    assert torch.equal(laid, x)


def test_the_backward_of_cudnn_gets_everything_laid_out(monkeypatch):
    seen = {}

    def backward(do, q, k, v, o, lse, *rest, scale):
        seen.update(do=do.stride(), o=o.stride(), lse=lse.stride())
        return q, k, v

    monkeypatch.setattr(library, "aten", SimpleNamespace(_scaled_dot_product_cudnn_attention_backward=backward))
    q = torch.randn(2, 3, 5, 8)
    cut = torch.randn(2, 3, 9, 8)[:, :, :5]
    BACKENDS["cudnn"].backward(cut, q, q, q, cut, torch.randn(2, 3, 9)[:, :, :5], True, 0.3)
    assert seen == {"do": q.stride(), "o": q.stride(), "lse": (15, 5, 1, 1)}


def test_a_single_pair_which_cudnn_refuses_goes_to_flash_attention(monkeypatch):
    """A text of one token more than a whole number of chunks ends in such a call."""

    def backward(do, q, k, v, *rest, scale):
        return q, k, v

    monkeypatch.setattr(library, "aten", SimpleNamespace(_scaled_dot_product_flash_attention_backward=backward))
    q, k = torch.randn(2, 6, 1, 8), torch.randn(2, 3, 1, 8)
    found = BACKENDS["cudnn"].backward(q, q, k, k, q, torch.randn(2, 6, 1), True, 0.3)
    assert [x.shape for x in found] == [q.shape, k.shape, k.shape]


@pytest.mark.parametrize(
    ("fastest", "asked", "skipping", "consecutive"),
    [
        ("cudnn", None, "flash", "cudnn"),
        ("cudnn", "cudnn", "cudnn", "cudnn"),  # whoever names a library gets it
        ("efficient", None, "efficient", "efficient"),
    ],
)
def test_texts_with_skipped_positions_do_not_go_to_cudnn(monkeypatch, fastest, asked, skipping, consecutive):
    """The calls of each such text have shapes of their own, and cuDNN would prepare a plan for each (`ROUND`)."""
    monkeypatch.setattr(blocked, "backend_for", lambda q, v, name=None: BACKENDS[name or fastest])
    for step, expected in ((50, skipping), (1, consecutive)):
        positions = torch.cat([torch.arange(30), torch.arange(40) + 29 + step])
        given = {"query_positions": positions, "key_positions": positions}
        calls = blocked.prepare(random_problem(small_law("3d-rpe"), t=70, s=70, **given), asked)
        assert calls.tasks
        assert [(calls.name, task.backend.name) for _, task in calls.tasks] == [(expected, expected)] * len(calls.tasks)


def test_flash_triangles_with_more_rows_than_keys_begin_at_the_first_row(monkeypatch):
    """Flash aligns a triangle with its last row: with fewer keys than rows the first rows would see none of theirs."""

    def scores(q, k, causal, scale):
        score = q @ k.mT * scale
        after = torch.ones_like(score, dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
        return score.masked_fill(after, -torch.inf) if causal else score

    def forward(q, k, v, dropout, causal, mask, *, scale):
        score = scores(q, k, causal, scale)
        return score.softmax(-1) @ v, score.logsumexp(-1)

    def backward(do, q, k, v, o, lse, _, __, rows, columns, dropout, causal, *___, scale):
        weight = torch.exp(scores(q, k, causal, scale) - lse[..., None])
        score = weight * (do @ v.mT - (do * o).sum(-1, keepdim=True)) * scale
        return score @ k, score.mT @ q, weight.mT @ do

    names = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward")
    monkeypatch.setattr(library, "aten", SimpleNamespace(**dict(zip(names, (forward, backward), strict=True))))
    q, do = (torch.randn(1, 2, 30, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(1, 2, 4, 8, dtype=torch.float64) for _ in range(2))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    score = (leaves[0] @ leaves[1].mT * 0.3).masked_fill(torch.ones(30, 4, dtype=torch.bool).triu(1), -torch.inf)
    truth = score.softmax(-1) @ leaves[2]
    out, lse = BACKENDS["flash"].forward(q, k, v, True, 0.3)
    torch.testing.assert_close(out, truth)
    torch.testing.assert_close(lse, score.logsumexp(-1))
    found = BACKENDS["flash"].backward(do, q, k, v, out, lse, True, 0.3)
    for ours, exact in zip(found, torch.autograd.grad((truth * do).sum(), leaves), strict=True):
        torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
def test_the_efficient_backward_is_given_an_output_whose_heads_lie_together(monkeypatch, order):
    """PyTorch's kernel_backward.h has o_strideM = head_dim_value * num_heads, whatever the tensor's own stride is."""
    given = []
    monkeypatch.setattr(
        library,
        "aten",
        SimpleNamespace(_scaled_dot_product_efficient_attention_backward=lambda *x, scale: given.append(x) or x[1:5]),
    )
    q, k, v, do, out = (torch.randn(2, 6, 40, 16) for _ in range(5))
    lying = out.permute(order).contiguous().permute(sorted(range(4), key=order.__getitem__))
    BACKENDS["efficient"].backward(do, q, k, v, lying, torch.zeros(2, 6, 40), True, 0.25)
    seen = given[0][5]
    assert torch.equal(seen, out)
    assert seen.stride()[2:] == (6 * 16, 1)
