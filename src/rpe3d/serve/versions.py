"""Versions of vLLM that laws are tested with, and whatever differs between them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

ON_CPU = ("0.28", "0.29", "0.30", "0.31", "0.32")
"""Minor versions whose CPU build has passed the tests, the oldest first."""
ON_GPU = ("0.32",)
"""Minor versions that have run on a GPU."""
PER_REQUEST = {
    "positions", "is_prefilling", "seq_lens_cpu_upper_bound", "req_idx", "_seq_lens_cpu", "_num_computed_tokens_cpu",
    "_num_computed_tokens_cache", "_token_to_req_indices_cache",
}  # fmt: skip
"""What vLLM's metadata may hold of each request besides: no version has all, and each is made again if it is None."""


def version_refusal(version: str, device: str = "cpu") -> str | None:
    """Return why a version of vLLM is refused on a device; None for one that is supported."""
    tested = ON_CPU if device == "cpu" else ON_GPU
    if ".".join(version.split(".")[:2]) in tested:
        return None
    place = "on a CPU" if device == "cpu" else "on a GPU"
    return f"vLLM is {version}, and laws are tested {place} with {', '.join(tested)} alone"


def forgotten(common: Any) -> dict[str, None]:
    """Return what to take out of a batch's metadata when requests are taken out of the batch."""
    return {field.name: None for field in fields(common) if field.name in PER_REQUEST}


def instructions(implementation: Any, layer: Any) -> str:
    """Return the instruction set of vLLM's CPU attention: the layer knows it since 0.29, its implementation before."""
    return str(getattr(layer, "isa", None) or implementation.isa)
