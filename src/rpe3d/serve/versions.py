"""Versions of vLLM that laws are tested with, and whatever differs between them."""

from __future__ import annotations

VERSIONS = ("0.32",)
"""Minor versions, the oldest first."""


def version_refusal(version: str) -> str | None:
    """Return why a version of vLLM is refused; None for one that is supported."""
    if ".".join(version.split(".")[:2]) in VERSIONS:
        return None
    return f"vLLM is {version}, and laws are tested with {', '.join(VERSIONS)} alone"
