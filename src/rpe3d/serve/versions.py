"""Versions of vLLM that laws are tested with, and the differences between them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

ON_CPU = ("0.28", "0.29", "0.30", "0.31", "0.32")
"""Minor versions whose CPU build has passed the tests, oldest first."""
ON_GPU = ("0.32",)
"""Minor versions that have run on a GPU."""
PER_REQUEST = {
    "positions", "is_prefilling", "seq_lens_cpu_upper_bound", "req_idx", "_seq_lens_cpu", "_num_computed_tokens_cpu",
    "_num_computed_tokens_cache", "_token_to_req_indices_cache",
}  # fmt: skip
"""Optional per-request entries of vLLM's metadata: no version has all, and each is rebuilt if it is None."""


def tested_on(device: str) -> tuple[str, ...]:
    """Return the minor versions of vLLM that laws are tested with on a device, the oldest first."""
    return ON_CPU if device == "cpu" else ON_GPU


def version_refusal(version: str, device: str = "cpu") -> str | None:
    """Return why a version of vLLM is refused on a device; None for one that is supported."""
    tested = tested_on(device)
    if ".".join(version.split(".")[:2]) in tested:
        return None
    place = "on a CPU" if device == "cpu" else "on a GPU"
    return f"vLLM is {version}, but laws are tested {place} only with {', '.join(tested)}"


def forgotten(common: Any) -> dict[str, None]:
    """Return what to remove from a batch's metadata when requests are removed from the batch."""
    return {field.name: None for field in fields(common) if field.name in PER_REQUEST}


def instructions(implementation: Any, layer: Any) -> str:
    """Return the instruction set of vLLM's CPU attention: the layer knows it since 0.29, its implementation before."""
    return str(getattr(layer, "isa", None) or implementation.isa)
