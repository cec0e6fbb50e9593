"""What vLLM calls when it starts: the entry point `vllm.general_plugins`. Nothing changes for models without a law."""

from __future__ import annotations

BACKENDS = {"CPU_ATTN": "rpe3d.serve.cpu.Backend", "FLASH_ATTN": "rpe3d.serve.cuda.Backend"}
"""vLLM's attention backends that ours stand in for; each is its own base class for models without a law."""


def register() -> None:
    """Register the rope type and the backends. Runs in every process of vLLM, and may run again."""
    import vllm

    from rpe3d.serve import metrics
    from rpe3d.serve.checks import version_refusal
    from rpe3d.serve.rope import install

    install()
    metrics.install()
    if version_refusal(vllm.__version__):
        return  # the rotary layer of a model with a law will say so; other models are none of our business
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name, path in BACKENDS.items():
        register_backend(AttentionBackendEnum[name], path)
