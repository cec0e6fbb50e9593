"""The rotary layer that vLLM makes for a model with a law, with the same angles as under Hugging Face."""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

import torch
import vllm
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform

from rpe3d.config import ConfigError
from rpe3d.geometry import Law
from rpe3d.geometry.region import STOCK
from rpe3d.models.registry import DYNAMIC, NAME
from rpe3d.rotation import cos_sin
from rpe3d.serve import adapters, metrics
from rpe3d.serve.checks import check_engine, check_model, check_told
from rpe3d.serve.refusals import told
from rpe3d.serve.versions import version_refusal

MADE: set[str] = set()
"""Laws that have a rotary layer in this process: without one, a backend must not run."""


def install() -> None:
    """Replace vLLM's `get_rope` with one that supports laws, once."""
    stock = rotary_embedding.get_rope
    if hasattr(stock, "__wrapped__"):
        return

    @wraps(stock)
    def get_rope(
        head_size: int,
        max_position: int,
        is_neox_style: bool = True,
        rope_parameters: dict[str, Any] | None = None,
        *rest: Any,
        **named: Any,
    ) -> Any:
        if version_refusal(vllm.__version__, current_platform.device_type) is None:
            adapters.install()  # here, since only the processes that build models have loaded what it wraps
        if (rope_parameters or {}).get("rope_type") not in (NAME, DYNAMIC):
            if metrics.VARIABLE in os.environ:
                _check_told()
            return stock(head_size, max_position, is_neox_style, rope_parameters, *rest, **named)
        assert rope_parameters is not None
        law = _checked(head_size, is_neox_style)
        MADE.add(law.json)
        length = max(max_position, law.context)
        if as_vllm_turns(law):
            return stock(head_size, length, is_neox_style, own_parameters(rope_parameters), *rest, **named)
        return LawRotary(law, length)

    rotary_embedding.get_rope = get_rope


@told()
def _check_told() -> None:
    check_told(get_current_vllm_config().model_config.hf_text_config)


@told()
def _checked(head_size: int, is_neox_style: bool) -> Law:
    """Return the law of the model that is being built; refuse a law or an engine that cannot be served."""
    from vllm.v1.attention.selector import get_attn_backend

    from rpe3d.serve.backend import LawBackend

    engine = get_current_vllm_config()
    law = check_model(engine.model_config.hf_text_config)
    check_told(engine.model_config.hf_text_config)
    check_engine(engine, law)
    if law.rotary.head_dim != head_size or law.rotary.interleaved == is_neox_style:
        raise ConfigError("the law was made for a model whose heads rotate differently", "extend this model again")
    if law.single_turn is None and law.needs_attention:
        backend = get_attn_backend(head_size, torch.get_default_dtype(), engine.cache_config.cache_dtype)
        if not issubclass(backend, LawBackend):
            raise ConfigError(
                f"{law.name} needs the attention backend of rpe3d, but vLLM runs {backend.get_name()}",
                "leave --attention-backend out; a GPU needs float16 or bfloat16, and compute capability 8.0",
            )
    return law


def own_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the rope parameters that a layer had before it was given a law: one dict, or one per layer type."""
    stock: dict[str, Any] = parameters["stock"]
    return stock if "rope_type" in stock or "rope_theta" in stock else stock["full_attention"]


def as_vllm_turns(law: Law) -> bool:
    """Return whether vLLM's own table equals the law's: short prompts are then bit-identical to the stock model's."""
    scaling, same = law.rotary.scaling, law.keeps_frequencies and law.keeps_scaling
    return same and law.single_turn in (None, STOCK) and (scaling is None or scaling.rope_type == "llama3")


class LawRotary(RotaryEmbedding):  # type: ignore[misc]
    """vLLM's rotary layer with a law's angles: its single turn, or stock RoPE with the law's frequencies."""

    def __init__(self, law: Law, length: int) -> None:
        self.law = law
        rotary = law.rotary
        super().__init__(
            rotary.head_dim,
            rotary.rotary_dim,
            length,
            rotary.rope_theta,
            not rotary.interleaved,
            torch.get_default_dtype(),
        )

    def _compute_cos_sin_cache(self) -> Tensor:
        turn, positions = self.law.single_turn or STOCK, torch.arange(self.max_position_embeddings, device="cpu")
        angles = turn.angle(positions, self.law.frequencies())
        table = torch.cat(cos_sin(angles, scaling=self.law.attention_scaling), dim=-1)
        return table.to(torch.get_default_device())
