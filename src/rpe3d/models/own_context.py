"""Read the long context that a checkpoint already claims: in its rope parameters, or as dual chunk attention.

A law starts from there: the pretrained length of a model is its config's `max_position_embeddings`, except under dual
chunk attention (Qwen2.5-1M), which is itself a law: `dca` with the sizes from the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rpe3d.config import ConfigError, whole
from rpe3d.geometry import LawSpec
from rpe3d.models.carried import parameters_of


@dataclass(frozen=True, kw_only=True)
class OwnContext:
    """A long context that a config declares."""

    kind: str
    """A rope type, or `dual chunk attention`."""
    original: int
    """Length that the extension starts from."""
    length: int
    """Length that the extension reaches."""
    law: str | None = None
    """Equivalent law, if there is one; transformers does not read this part of the config."""
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        sizes = "".join(f", {name} {value}" for name, value in self.parameters.items())
        as_law = f": the law {self.law!r}{sizes}" if self.law else ""
        return f"{self.kind}, {self.original} to {self.length} positions{as_law}"


def own_context(config: Any) -> OwnContext | None:
    """Return the long context that a stock text config declares; None if it declares none."""
    length = int(getattr(config, "max_position_embeddings", None) or 0)
    if isinstance(dual := getattr(config, "dual_chunk_attention_config", None), Mapping):
        return _dual_chunk(dual, length)
    own = parameters_of(config) or {}
    kind, factor = own.get("rope_type", "default"), float(own.get("factor") or 1)
    if kind not in ("linear", "dynamic", "llama3", "yarn", "longrope"):
        return None
    original = int(own.get("original_max_position_embeddings") or 0)
    return OwnContext(kind=kind, original=original or int(length / factor), length=length)


def _dual_chunk(dual: Mapping[str, Any], length: int) -> OwnContext:
    """Read dual chunk attention as vLLM's `DualChunkRotaryEmbedding` does: chunks of chunk_size - local_size tokens.

    A query is at min(m + c, chunk_size) for the previous chunk and at min(2c - 1, chunk_size) for farther ones.
    """
    size, local = (whole(name, dual.get(name, usual)) for name, usual in (("chunk_size", 8192), ("local_size", 1024)))
    chunk = size - local
    if 2 * chunk - 1 < size:
        raise ConfigError(
            f"dual_chunk_attention_config has local_size {local}, more than half of chunk_size {size}",
            "correct the config: these sizes are not valid for dual chunk attention",
        )
    original = int(dual.get("original_max_position_embeddings") or 0)
    parameters: dict[str, Any] = {"chunk": chunk, "window": size}
    if original:  # without it vLLM has no temperature
        parameters["growth"] = 0.1
    return OwnContext(
        kind="dual chunk attention", original=original or size, length=length, law="dca", parameters=parameters
    )


def pretrained_positions(config: Any) -> int | None:
    """Return how many positions a stock model was made for, before any law; None if its config does not say."""
    own = own_context(config)
    if own is not None and own.law:
        return own.original
    said = getattr(config, "max_position_embeddings", None)
    return None if said is None else int(said)


def own_parameters(model: Any, law: str) -> Mapping[str, Any]:
    """Return the parameters that a model's config gives a law: the sizes of dual chunk attention, or nothing."""
    own = own_context(model.config.get_text_config(decoder=True))
    return own.parameters if own is not None and own.law == law else {}


def as_the_checkpoint_has_it(model: Any, spec: LawSpec) -> LawSpec:
    """Return a law that was asked for by name, with the parameters that the model's config gives it."""
    if spec.pretrained is not None:  # read from a file, which has them all
        return spec
    return replace(spec, parameters={**own_parameters(model, spec.name), **spec.parameters})
