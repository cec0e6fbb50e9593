"""Shared parts of the two forms of 3D-RPE with a chunk phase: φ_j = base^(-j), and the interpolation of Theorem 1."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from rpe3d.config import ConfigError, flag, real
from rpe3d.geometry.law import Law, parameter


def interpolated_chunk(pretrained: int, context: int, chunk: int) -> int:
    """Return the chunk of Theorem 1: the n = ceil(L_p / c) chunks stay, and each grows to c' = ceil(L / n) tokens."""
    return math.ceil(context / math.ceil(pretrained / chunk))


@dataclass(frozen=True, kw_only=True)
class Phased(Law):
    """Base of the forms whose second coordinate is a phase φ_j = base^(-j) of the chunk, as the paper prints it."""

    single_position: ClassVar[bool] = False

    chunk: int = parameter(None, "tokens per chunk, c; default 3/4 of pretrained, or fewer if interpolation needs it")
    phi_base: float = parameter(10000.0, "base of the chunk's phase, φ_j = base^(-j)")
    interpolate: bool = parameter(False, "Theorem 1: keep the number of chunks and let each grow to c' = ceil(L / n)")

    @property
    def chunk_in_use(self) -> int:
        """The chunk size c, or c' if the law interpolates."""
        return self._grown(self.chunk, self.interpolate)

    def _grown(self, chunk: int, interpolate: bool) -> int:
        return interpolated_chunk(self.pretrained, self.context, chunk) if interpolate else chunk

    def _check_phase(self, chunk: int, largest: int) -> dict[str, Any]:
        """Check the shared parameters; `largest` is the maximum size of a chunk in use."""
        interpolate = flag("interpolate", self.interpolate)
        if chunk > largest:
            raise ConfigError(f"chunk is {chunk}, above {largest}", f"lower chunk to at most {largest}")
        grown = self._grown(chunk, interpolate)
        if grown > largest:
            least = math.ceil(self.context / largest)
            raise ConfigError(
                f"interpolation grows chunk {chunk} to {grown}, above {largest} (Theorem 1 needs c' <= L_p)",
                f"lower chunk to at most {max(1, self.pretrained // least)}, or lower context",
            )
        base = real("phi_base", self.phi_base, least=1.0, most=1e100, above=True)
        return {"chunk": chunk, "phi_base": base, "interpolate": interpolate}

    def _fitting(self, chunk: int, largest: int) -> int:
        """Return a default chunk: `chunk`, or the largest whose interpolation stays within `largest`."""
        if self.interpolate is not True or self._grown(chunk, True) <= largest:
            return chunk
        return max(1, self.pretrained // math.ceil(self.context / largest))
