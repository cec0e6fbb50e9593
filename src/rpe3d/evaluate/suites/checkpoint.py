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
