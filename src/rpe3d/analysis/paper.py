"""Compute the paper's figures as tables: what it prints, next to what its definitions give (docs/errata.md)."""

from __future__ import annotations

import cmath
import math
from typing import Any

import torch
from torch import Tensor

from rpe3d.analysis.shown import shown
from rpe3d.analysis.table import Table
from rpe3d.geometry import Law, bloch_vector, decay_bound, make_law, relative_position_matrix, resolution
from rpe3d.geometry.laws.definition import Definition

LLAMA2: dict[str, Any] = {"pretrained": 4096, "head_dim": 128, "rope_theta": 10000.0}
SMALL: dict[str, Any] = {"pretrained": 16, "context": 24, "head_dim": 128, "rope_theta": 10000.0}
FORMS = ("3d-rpe-definition", "3d-rpe-dual-chunk", "3d-rpe")
FLOOR = 5.0
"""What E_3d-rpe "stays at or above", and what E_rope is "below" from about 1000 on, by section 3.2.1."""


def circle(plane: int = 10) -> Table:
    """Compute Figure 1 (a): a token at position p is at the angle p θ_l of a circle (eq. 2)."""
    law = make_law("rope", **SMALL)
    position = torch.arange(law.context)
    angle = _turn(law, position, plane)
    rows = zip(
        position.tolist(),
        [p < law.pretrained for p in position.tolist()],
        angle.tolist(),
        angle.cos().tolist(),
        angle.sin().tolist(),
        strict=True,
    )
    return Table(
        title="Figure 1 (a): RoPE on its circle",
        caption=f"{law.context} tokens in plane {plane} of a head of {SMALL['head_dim']} dimensions, base 10000. "
        f"Beyond the pretrained length, here {law.pretrained}, a token is where none was in training.",
        columns=("position", "in training", "angle", "x", "y"),
        rows=list(rows),
    )


def sphere(plane: int = 4) -> Table:
    """Compute Figure 1 (b): longitude m θ_l within a chunk, and its phase as the angle from the pole, 2 φ_j (eq. 1)."""
    rows = []
    for base in (2.0, 10000.0):
        law = _definition(chunk=8, phi_base=base)
        position = torch.arange(law.context)
        points = bloch_vector(law, position, plane, longitude="global")
        for p, (x, y, z) in zip(position.tolist(), points.tolist(), strict=True):
            j, m = divmod(p, law.chunk)
            rows.append((base, p, j, m, base**-j, x, y, z))
    return Table(
        title="Figure 1 (b): 3D-RPE on the sphere",
        caption="24 tokens in chunks of 8: within a chunk they go round, from chunk to chunk they go up. With the "
        "printed base of the phase, 10000, every chunk but the first lies at the pole (errata 3, 10).",
        columns=("phi_base", "position", "chunk", "offset", "phi", "x", "y", "z"),
        rows=rows,
    )


def decay(context: int = 8000) -> Table:
    """Compute Figure 1 (c)(d): the bound E of eq. 7 for the last query, at every distance; RoPE and all 3D-RPE.

    The paper's c = 1000 divides the context, so that the last query sees the offsets m - n = 0 .. 999 of each chunk.
    """
    laws = [make_law(name, context=context, **LLAMA2) for name in ("rope", *FORMS[1:])]
    laws.insert(1, make_law(FORMS[0], context=context, chunk=1000, **LLAMA2))
    last, distance = context - 1, torch.arange(context)
    rows = []
    for law in laws:
        bound = decay_bound(law, last, last - distance).tolist()
        rows += [(law.name, *pair) for pair in zip(distance.tolist(), bound, strict=True)]
    return Table(
        title="Figure 1 (c)(d): the bound of eq. 7",
        caption="How strongly a pair can correlate at most. d = 128, base 10000, pretrained 4096, context 8000. Beyond "
        "1000 RoPE is not always below 5, nor does 3D-RPE as defined stay above it (errata 7, 8).",
        columns=("law", "distance", "bound"),
        rows=rows,
    )


def interpolation() -> Table:
    """Compute Figure 1 (e)(f), Theorem 1: how far apart neighbours are shown when chunks or positions are stretched."""
    rows: list[tuple[Any, ...]] = []
    for factor in (1, 1.5, 2, 3, 4, 6, 8, 12, 16):
        context = int(LLAMA2["pretrained"] * factor)
        for name in ("linear", FORMS[0], "3d-rpe"):
            stretched: dict[str, Any] = {"interpolate": True} if name == FORMS[0] else {}
            law = make_law(name, context=context, **LLAMA2, **stretched)
            chunk = getattr(law, "chunk_in_use", None)
            within = resolution(law, 2, 1)[0].item()
            border = resolution(law, chunk, chunk - 1)[0].item() if chunk else None
            rows.append((name, context, chunk, within, border))
    return Table(
        title="Figure 1 (e)(f): resolution of neighbours under interpolation",
        caption="In units of θ_0, pretrained 4096. RoPE with PI tells neighbours apart by L_p / L. 3D-RPE with PI "
        "keeps 1 within a chunk; across a border the previous token comes a chunk into the future (erratum 11). "
        "3D-RPE, bounded, needs no interpolation and has no such border among neighbours.",
        columns=("law", "context", "chunk", "within", "border"),
        rows=rows,
    )


def chunking(plane: int = 4) -> Table:
    """Compute Figure 2: L = 12 tokens in chunks of c = 4, and h = (1, 0) turned by m θ + π/2 - φ_j (Definition 1)."""
    law = make_law(FORMS[0], pretrained=8, context=12, head_dim=128, rope_theta=10000.0, chunk=4, phi_base=2.0)
    position = torch.arange(law.context)
    rows = []
    for p, angle in zip(position.tolist(), _turn(law, position, plane).tolist(), strict=True):
        j, m = divmod(p, 4)
        rows.append((p, j, m, 2.0**-j, angle, math.cos(angle), math.sin(angle)))
    return Table(
        title="Figure 2: chunks, and the turn of a state vector",
        caption="The phase φ_j tilts h⊥ towards h, the offset m rotates the result by m θ. Both are rotations in one "
        "plane, so together they are one, by m θ + π/2 - φ_j (erratum 6). Drawn with phase base 2, to be visible.",
        columns=("position", "chunk", "offset", "phi", "angle", "x", "y"),
        rows=rows,
    )


def matrices(chunk: int = 4, length: int = 12) -> Table:
    """Compute Figure 3: the relative position of every query and key, as printed, and in each form of 3D-RPE."""
    common: dict[str, Any] = {"context": length, "head_dim": 128, "chunk": chunk}
    laws = {
        "dual-chunk": make_law(FORMS[1], pretrained=2 * chunk, window=3 * chunk // 2, **common),
        "bounded": make_law(FORMS[2], pretrained=10, window=chunk, reach=10, **common),
    }
    position = torch.arange(length)
    printed = relative_position_matrix(chunk, length)
    defined = relative_position_matrix(chunk, length, "definition")
    seen = {name: shown(law, position[:, None], position[None, :]) for name, law in laws.items()}
    seen = {"printed": printed[..., 0] * chunk + printed[..., 1], "definition": defined[..., 1]} | seen
    rows = []
    for form, f in seen.items():
        pairs = printed if form == "printed" else defined
        for query in range(length):
            for key in range(query + 1):
                between, within = pairs[query, key].tolist()
                rows.append((form, query, key, int(between), int(within), f[query, key].item()))
    return Table(
        title=f"Figure 3: relative position matrix, c = {chunk}, L = {length}",
        caption="Rows are queries, columns keys. As printed, no per-token rotation can produce it; Definition 1 shows "
        "tokens of the previous chunk as coming after the query (errata 4, 5). Dual-chunk and bounded show no negative "
        "position; the bounded form stays exact for its neighbours (window 4) and below its reach, 10.",
        columns=("form", "query", "key", "between", "within", "shown"),
        rows=rows,
    )


def bloch(phi: float = 1.0, theta_1: float = 0.9) -> Table:
    """Compute Supplement A: the state e^{iθ} (cos(φ/2) |0> + sin(φ/2) e^{iθ_1} |1>) on the Bloch sphere (eq. 1)."""
    rows = []
    states = (("|0⟩", 0.0, 0.0), ("|1⟩", math.pi, 0.0), ("|+⟩", math.pi / 2, 0.0), ("|i⟩", math.pi / 2, math.pi / 2))
    for name, polar, longitude in (*states, ("|φ⟩", phi, theta_1)):
        alpha, beta = math.cos(polar / 2), math.sin(polar / 2) * cmath.exp(1j * longitude)
        rows.append((name, polar, longitude, *_point(alpha, beta)))
    law = _definition(chunk=8, phi_base=2.0)
    points = bloch_vector(law, torch.arange(law.context)).tolist()
    for j in range(3):
        rows.append((f"chunk {j}", 2 * 2.0**-j, 0.0, *points[8 * j]))
    return Table(
        title="Supplement A: the Bloch sphere",
        caption="A state by its two angles. The global phase θ does not show: all tokens of a chunk of 3D-RPE, here "
        "with phase base 2, are one point (erratum 10).",
        columns=("state", "phi", "theta_1", "x", "y", "z"),
        rows=rows,
    )


def _point(alpha: complex, beta: complex) -> tuple[float, float, float]:
    xy = 2 * alpha.conjugate() * beta
    return xy.real, xy.imag, abs(alpha) ** 2 - abs(beta) ** 2


def _definition(**parameters: Any) -> Definition:
    law = make_law(FORMS[0], **SMALL, **parameters)
    assert isinstance(law, Definition)
    return law


def _turn(law: Law, position: Tensor, plane: int) -> Tensor:
    """Return the angle by which a law of a single region turns a vector at each position, in one plane."""
    return law.regions[0].query.angle(position, law.frequencies())[:, plane]
