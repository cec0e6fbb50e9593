"""Run many small attention calls as one: gather their tokens, make one ragged library call, and put them back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from rpe3d.attention.blocked.backends import Backend, Ends, Forward, Gradients
from rpe3d.attention.blocked.schedule import Piece


@dataclass(frozen=True, kw_only=True, eq=False)
class Pack:
    """Pieces one after the other. Their tokens come from one long sequence, in any order; keys may repeat."""

    tokens: int
    """Number of tokens in the sequence."""
    rows: list[int]
    """Number of rows of each piece."""
    columns: list[int]
    queries: Int64[Tensor, " r"] | None
    """Indices of the query tokens; None: all of them, in order."""
    keys: Int64[Tensor, " c"] | None
    ends: Ends

    def rows_of(self, x: Float[Tensor, "1 h t d"]) -> Float[Tensor, "1 h r d"]:
        """Return the rows of `x` that belong to the queries."""
        return _gathered(x, self.queries)

    def keys_of(self, x: Float[Tensor, "1 h t d"]) -> Float[Tensor, "1 h c d"]:
        """Return the rows of `x` that belong to the keys."""
        return _gathered(x, self.keys)

    def forward(self, backend: Backend, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Forward:
        """Run the forward on gathered vectors, for all tokens; tokens in no piece have a log-sum-exp of -inf."""
        if backend.ragged_forward is not None:
            out, lse = backend.ragged_forward(q, k, v, causal, scale, self.ends)
        else:
            alone = zip(q.split(self.rows, 2), k.split(self.columns, 2), v.split(self.columns, 2), strict=True)
            found = [backend.forward(*vectors, causal, scale) for vectors in alone]
            out, lse = (torch.cat(parts, 2) for parts in zip(*found, strict=True))
        if self.queries is None:
            return out, lse
        whole = torch.full((1, lse.shape[1], self.tokens), -torch.inf, dtype=lse.dtype, device=lse.device)
        return self._put_back(out), whole.index_copy_(2, self.queries, lse)

    def backward(
        self,
        backend: Backend,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> Gradients:
        """Return the gradients of all tokens from those of gathered vectors."""
        if backend.ragged_backward is not None:
            dq, dk, dv = backend.ragged_backward(do, q, k, v, o, lse, causal, scale, self.ends)
        else:
            by_row = (x.split(self.rows, 2) for x in (q, do, o, lse))
            by_column = (x.split(self.columns, 2) for x in (k, v))
            alone = zip(*by_row, *by_column, strict=True)
            found = [backend.backward(do, q, k, v, o, lse, causal, scale) for q, do, o, lse, k, v in alone]
            dq, dk, dv = (torch.cat(parts, 2) for parts in zip(*found, strict=True))
        return self._put_back(dq), self._added(dk), self._added(dv)

    def _put_back(self, x: Float[Tensor, "1 h r d"]) -> Float[Tensor, "1 h t d"]:
        """Return the row of every token, or zeros."""
        if self.queries is None:
            return x
        whole = x.new_zeros(1, self.tokens, x.shape[1], x.shape[3])
        return whole.index_copy_(1, self.queries, x.transpose(1, 2)).transpose(1, 2)

    def _added(self, x: Float[Tensor, "1 h c d"]) -> Float[Tensor, "1 h t d"]:
        """Return for every token the sum of its columns."""
        if self.keys is None:
            return x
        precise = torch.promote_types(x.dtype, torch.float32)
        whole = torch.zeros(1, self.tokens, x.shape[1], x.shape[3], dtype=precise, device=x.device)
        return whole.index_add_(1, self.keys, x.transpose(1, 2).to(precise)).transpose(1, 2)


def pack(pieces: tuple[Piece, ...], tokens: int, device: torch.device) -> Pack:
    """Return what a call of these pieces gathers from so many tokens."""
    rows, columns = [piece.rows for piece in pieces], [piece.columns for piece in pieces]
    return Pack(
        tokens=tokens,
        rows=rows,
        columns=columns,
        queries=_index([range(piece.query, piece.query + piece.rows) for piece in pieces], tokens, device),
        keys=_index([range(piece.key, piece.key + piece.columns) for piece in pieces], tokens, device),
        ends=Ends(_ends(rows, device), _ends(columns, device), max(rows), max(columns)),
    )


def _index(spans: Sequence[range], tokens: int, device: torch.device) -> Int64[Tensor, " r"] | None:
    index = torch.cat([torch.arange(span.start, span.stop) for span in spans])
    return None if torch.equal(index, torch.arange(tokens)) else index.to(device)


def _ends(lengths: Sequence[int], device: torch.device) -> Int32[Tensor, " ends"]:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def _gathered(x: Float[Tensor, "1 h t d"], index: Int64[Tensor, " r"] | None) -> Float[Tensor, "1 h r d"]:
    """Gather tokens by index (None: all of them); in the result, the heads of a token lie together."""
    return x if index is None else x.transpose(1, 2).index_select(1, index).transpose(1, 2)
