"""What other people's checkpoints say of their own context, where transformers does not read it."""

from __future__ import annotations

from typing import Any

from rpe3d.config import ConfigError


def own_length(model: Any) -> int:
    """The context that a model was made for: Vicuna 16k and LongChat say it in `max_sequence_length`."""
    config = model.config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "max_sequence_length", "seq_length")
    said = [int(getattr(config, name, None) or 0) for name in names]
    if not any(said):
        raise ConfigError(f"{type(model).__name__} does not say how long its context is", "give --length")
    return max(said)


def condense(model: Any) -> str | None:
    """Give LongChat the positions that it was trained with, in place; returns what the user should be told.

    Its config asks for them in `rope_condense_ratio`, which FastChat reads and transformers does not: positions are
    divided by it, as in linear scaling.
    """
    config = model.config.get_text_config(decoder=True)
    ratio = getattr(config, "rope_condense_ratio", None)
    if not ratio or config.rope_parameters.get("rope_type", "default") != "default":
        return None
    config.rope_parameters = {**config.rope_parameters, "rope_type": "linear", "factor": float(ratio)}
    decoder = model.get_decoder()
    decoder.rotary_emb = type(decoder.rotary_emb)(config=config).to(model.device)
    return f"its positions are divided by {ratio:g}, as `rope_condense_ratio` in its config asks for"
