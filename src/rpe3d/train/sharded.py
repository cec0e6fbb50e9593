"""FSDP2: weights, gradients and optimizer divided among the processes, as `recipes/fsdp2.yaml` asks for.

accelerate reads that file and tells its processes through environment variables, which are read here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rpe3d.config import ConfigError
from rpe3d.train.settings import Settings

WEIGHTS, OPTIMIZER = "pytorch_model_fsdp.bin", "optimizer.bin"
"""Files of an FSDP checkpoint besides the adapter or model: a run under FSDP resumes from these."""
NEEDED = (
    ("FSDP_VERSION", "1", "2", "supports only FSDP2"),
    ("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT", "FULL_STATE_DICT", "saves whole checkpoints"),
    ("FSDP_CPU_RAM_EFFICIENT_LOADING", "false", "false", "reads a model's weights to detect how it rotates"),
    ("FSDP_OFFLOAD_PARAMS", "false", "false", "keeps the trained parameters on the device"),
)
"""Variables, their defaults in accelerate, the values that a run needs, and why."""


def wanted(device: str) -> bool:
    """Return whether the launcher asked for FSDP: on a GPU for one process or more, on CPUs for several."""
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1 or (device == "cuda" and "LOCAL_RANK" in os.environ)
    return launched and _is("ACCELERATE_USE_FSDP", "true")


def _is(variable: str, value: str, absent: str = "false") -> bool:
    return os.environ.get(variable, absent).lower() == value.lower()


def check(settings: Settings, device: str, last: Path | None) -> None:
    """Refuse a configuration that a run under FSDP cannot be saved or resumed with, before weights are loaded."""
    divides = wanted(device)
    if last is not None and (last / WEIGHTS).exists() != divides:
        how = "without" if divides else "under"
        raise ConfigError(f"{last} was made {how} FSDP", "launch the run as before, or pass a new folder to --out")
    if not divides:
        return
    for variable, absent, needed, why in NEEDED:
        if not _is(variable, needed, absent):
            name = variable.lower()
            found = os.environ.get(variable, absent)
            raise ConfigError(
                f"{name} is {found}, but training {why}", f"set {name}: {needed}, as recipes/fsdp2.yaml does"
            )
    if settings.gradient_checkpointing and _is("FSDP_ACTIVATION_CHECKPOINTING", "true"):
        raise ConfigError(
            "fsdp_activation_checkpointing and gradient_checkpointing both recompute activations",
            "set fsdp_activation_checkpointing: false, or train with --no-gradient-checkpointing",
        )


def allow_cpus(state: Any) -> None:
    """Let accelerate divide a model among CPU processes as among GPUs.

    accelerate honours the request only if it finds several GPUs; CPU processes would all silently hold whole copies.
    """
    from accelerate.utils import DistributedType

    if wanted("cpu") and state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU


def keep_float32(plugin: Any) -> None:
    """Compute in bfloat16, but sum gradients and return the loss in float32; accelerate would round both."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
