"""The plugin that vLLM calls at start-up: entry point `vllm.general_plugins`. Models without a law are unaffected."""

from __future__ import annotations

BACKENDS = {"CPU_ATTN": "rpe3d.serve.cpu.Backend", "FLASH_ATTN": "rpe3d.serve.cuda.Backend"}
"""vLLM's attention backends that ours replace; each is its own base class for models without a law."""


def register() -> None:
    """Register the rope type, backends and the reading of configs. Runs in every process of vLLM, and may run again."""
    import vllm
    from vllm.platforms import current_platform

    from rpe3d.serve import fork, metrics
    from rpe3d.serve.rope import install
    from rpe3d.serve.versions import version_refusal

    fork.avoid_fork()
    install()
    metrics.install()
    if version_refusal(vllm.__version__, current_platform.device_type):
        return  # the rotary layer of a model with a law will say so; other models are none of our business
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from rpe3d.serve import configs

    configs.install()
    for name, path in BACKENDS.items():
        register_backend(AttentionBackendEnum[name], path)
