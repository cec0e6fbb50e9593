"""The attention of a training run, through transformers' registries.

It runs under a law, with skipped positions, shifted sparse, or with one sequence over several processes. Windows are
padded only on the right, which causal attention never sees: no mask is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rpe3d.attention import Shared
from rpe3d.attention.problem import Placed, Positions, placed
from rpe3d.config import ConfigError
from rpe3d.models import noted, registry
from rpe3d.models.carried import module_carried, module_law
from rpe3d.models.extend import text_config
from rpe3d.models.probe import unknown
from rpe3d.train.shifted import shifted
from rpe3d.train.ulysses import SequenceParallel

NAME = "rpe3d-training"


@dataclass(frozen=True, kw_only=True)
class TrainingAttention:
    """Attention under a law while training, for transformers. q and k arrive rotated by the law's frequencies."""

    skipping: bool = False
    """Whether positions skip ahead within a window, as in PoSE."""
    group: int | None = None
    """Tokens per group of shifted sparse attention."""
    parallel: SequenceParallel | None = None
    _last: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)
    _made: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        sliding_window: int | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if sliding_window is not None and (self.group or self.parallel):
            raise ConfigError("some layers of this model have a sliding window", "leave out s2 and sequence_parallel")
        if strange := unknown(kwargs):
            raise ConfigError(f"this attention also takes {strange}", "rpe3d cannot train this model")
        if dropout or sliding_window is not None:  # refused there, or left to the model
            return registry.attend(
                module,
                query,
                key,
                value,
                attention_mask,
                scaling=scaling,
                dropout=dropout,
                softcap=softcap,
                s_aux=s_aux,
                sliding_window=sliding_window,
                **kwargs,
            )
        law, held = module_law(module), module_carried(module)
        query, key = held.arranged(query), held.arranged(key)
        by_position = law.needs_attention  # else by the order of tokens alone
        kind = query.device.type
        if torch.is_autocast_enabled(kind):  # cos and sin, and so q and k, are float32 where the embeddings are
            query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))

        def attend(q: Tensor, k: Tensor, v: Tensor, positions: Positions, sinks: Tensor | None) -> Tensor:
            with torch.autocast(kind, enabled=False):  # the merge of parts is in float32
                places: dict[str, Any] = {"query_positions": positions, "key_positions": positions}
                out: Tensor = self._shared(positions)(
                    q, k, v, law, scale=scaling, softcap=softcap, sinks=sinks, rotated=True, **places
                )[0]
            return out

        positions = None
        if self.skipping and by_position:
            positions = noted.positions(module.config, position_ids) if held.notes else position_ids
        if self.group is not None:
            if law.chooses:
                raise ConfigError(
                    "far keys are chosen from the whole text, but s2 shows a token only its group",
                    "train with full attention, or with far=0",
                )
            out = shifted(query, key, value, s_aux, self.group, attend, by_position=by_position)
        elif self.parallel is not None:
            out = self.parallel.attend(query, key, value, s_aux, positions, attend, together=law.chooses)
        else:
            there = range(query.shape[2]) if positions is None else self._placed(positions, query.shape[0])
            out = attend(query, key, value, there, s_aux)
        return out.transpose(1, 2).contiguous(), None

    def _shared(self, positions: Positions) -> Shared:
        """Return the attention for all layers, and for all steps while positions stay the same."""
        if isinstance(positions, Tensor):  # made anew in every layer
            return Shared()
        same = self._made and (
            self._made[0] is positions or (isinstance(positions, range) and self._made[0] == positions)
        )
        if not same:
            self._made[:] = [positions, Shared()]
        made: Shared = self._made[1]
        return made

    def _placed(self, positions: Tensor, batch: int) -> Placed:
        """Read positions from the device once for all layers, each of which would otherwise wait for it."""
        if not self._last or self._last[0] is not positions or self._last[1] != positions._version:
            self._last[:] = [positions, positions._version, placed(positions.expand(batch, -1), None)]
        known: Placed = self._last[2]
        return known


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return None, which means causal, unless a layer has its own window, which keeps its mask."""
    return None if kwargs.get("local_size") is None else registry.make_mask(*args, **kwargs)


@contextmanager
def training_attention(model: Any, chosen: TrainingAttention) -> Iterator[None]:
    """Give a model this attention inside a `with` block."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, chosen)
    AttentionMaskInterface.register(NAME, _mask)
    config = text_config(model)
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
