"""Many small calls in one: against each of them alone, and through the library's ragged calls."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rpe3d.attention.blocked import backends as library
from rpe3d.attention.blocked.backends import BACKENDS
from rpe3d.attention.blocked.ragged import pack
from rpe3d.attention.blocked.schedule import Piece

TOKENS, HEADS, GROUPS, DIM, SCALE = 23, 6, 2, 8, 0.3
CPU = BACKENDS["cpu"]
SQUARES = (Piece(0, 9, 0, 9), Piece(9, 14, 9, 14))
SOME = (Piece(4, 5, 0, 3), Piece(12, 1, 2, 6), Piece(15, 8, 2, 6))  # rows of no piece, keys of none and of two


def vectors():
    torch.manual_seed(0)
    shapes = ((HEADS, TOKENS), (GROUPS, TOKENS), (GROUPS, TOKENS))
    return [torch.randn(1, t, h, DIM, dtype=torch.float64).transpose(1, 2) for h, t in shapes]


def cuts(x, start, length):
    return x[:, :, start : start + length]


def flash():
    """Flash attention's two ragged operations, as PyTorch documents them, by the CPU's attention."""

    def sequences(of, ends):
        return [x.transpose(0, 1)[None] for x in of.tensor_split(ends[1:-1].tolist())]

    def forward(q, k, v, rows, columns, longest_row, longest_column, dropout, causal, debug, *, scale):
        assert (longest_row, longest_column) == (int(rows.diff().max()), int(columns.diff().max()))
        assert rows.dtype == columns.dtype == torch.int32
        assert not dropout
        assert not debug
        assert q.shape[1] == k.shape[1] == v.shape[1]
        alone = zip(sequences(q, rows), sequences(k, columns), sequences(v, columns), strict=True)
        found = [CPU.forward(*x, causal, scale) for x in alone]
        out, lse = (torch.cat(parts, 2)[0] for parts in zip(*found, strict=True))
        return out.transpose(0, 1), lse, None, None, None

    def backward(do, q, k, v, o, lse, rows, columns, longest_row, longest_column, dropout, causal, *unused, scale):
        by_row = [sequences(x, rows) for x in (do, q, o)]
        logs = [x[None] for x in lse.tensor_split(rows[1:-1].tolist(), 1)]
        by_column = [sequences(x, columns) for x in (k, v)]
        alone = zip(*by_row, logs, *by_column, strict=True)
        found = [CPU.backward(do, q, k, v, o, log, causal, scale) for do, q, o, log, k, v in alone]
        return tuple(torch.cat(parts, 2)[0].transpose(0, 1) for parts in zip(*found, strict=True))

    return SimpleNamespace(_flash_attention_forward=forward, _flash_attention_backward=backward)


@pytest.fixture(params=["cpu", "flash"])
def backend(request, monkeypatch):
    if request.param == "flash":
        monkeypatch.setattr(library, "aten", SimpleNamespace(**vars(flash()), **kept()))
    return BACKENDS[request.param]


def kept():
    """What the CPU's attention calls."""
    names = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")
    return {name: getattr(torch.ops.aten, name) for name in names}


@pytest.mark.parametrize(("pieces", "causal"), [(SQUARES, True), (SOME, False)], ids=["squares", "some"])
def test_a_pack_is_its_pieces(backend, pieces, causal):
    q, k, v = vectors()
    one = pack(pieces, TOKENS, q.device)
    out, lse = one.forward(backend, one.rows_of(q), one.keys_of(k), one.keys_of(v), causal, SCALE)
    do, row_lse = torch.randn_like(q), torch.randn(1, HEADS, TOKENS, dtype=torch.float64)  # of whole rows, as in blocks
    shown = [one.rows_of(x) for x in (do, q)], [one.keys_of(x) for x in (k, v)]
    seen = one.rows_of(do), one.rows_of(row_lse[..., None])[..., 0]
    gradients = one.backward(backend, *shown[0], *shown[1], *seen, causal, SCALE)

    expected = torch.zeros_like(q), torch.full((1, HEADS, TOKENS), -torch.inf, dtype=q.dtype)
    added = [torch.zeros_like(x) for x in (q, k, v)]
    for piece in pieces:
        rows, columns = (piece.query, piece.rows), (piece.key, piece.columns)
        mine = cuts(q, *rows), cuts(k, *columns), cuts(v, *columns)
        found = CPU.forward(*mine, causal, SCALE)
        for whole, part in zip(expected, found, strict=True):
            cuts(whole, *rows).copy_(part)
        turned = cuts(do, *rows)
        found = CPU.backward(turned, *mine, turned, cuts(row_lse, *rows), causal, SCALE)
        for whole, part, where in zip(added, found, (rows, columns, columns), strict=True):
            cuts(whole, *where).add_(part)
    for ours, truth in zip((out, lse, *gradients), (*expected, *added), strict=True):
        torch.testing.assert_close(ours, truth, rtol=0, atol=1e-12)


def test_all_tokens_in_order_are_not_gathered():
    q, k, _ = vectors()
    one = pack(SQUARES, TOKENS, q.device)
    assert one.rows_of(q) is q
    assert one.keys_of(k) is k
