"""The library's calls: the rows that fill up a short end change nothing."""

from types import SimpleNamespace

import pytest
import torch

from rpe3d.attention import library
from rpe3d.attention.library import BACKENDS, ROUND


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
