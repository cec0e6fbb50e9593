"""Make the figures that the paper does not have: every law on one model, 8k extended to 64k, and how attention runs."""

from __future__ import annotations

from typing import Any

from rpe3d.analysis.shown import distances, runs, shown
from rpe3d.analysis.table import Table, numbers
from rpe3d.attention.blocked.schedule import schedule
from rpe3d.geometry import LAWS, make_law

MODEL: dict[str, Any] = {"pretrained": 8192, "context": 65536, "head_dim": 64, "rope_theta": 1e5}


def positions(points: int = 1024) -> Table:
    """Return the relative position shown in the fastest and in the slowest plane against distance, for every law."""
    rows = []
    for name in LAWS:
        law = make_law(name, **MODEL)
        last, distance = law.context - 1, distances(law, points)
        fastest, slowest = (numbers(shown(law, last, last - distance, plane).tolist()) for plane in (0, -1))
        rows += [(name, law.pretrained, *row) for row in zip(distance.tolist(), fastest, slowest, strict=True)]
    return Table(
        title="What each law shows the model",
        caption="Relative position instead of the true distance, for the last query of 64k tokens; pretrained on 8k "
        "(d = 64, base 100000), ignoring phases. The band marks the positions seen in training. If a law changes "
        "frequencies, the fastest plane is solid and the slowest dotted.",
        columns=("law", "pretrained", "distance", "fastest plane", "slowest plane"),
        rows=rows,
    )


def regions() -> Table:
    """Return which distances are exact, compressed, unseen or not attended to, for the last query under every law."""
    rows = []
    for name in LAWS:
        law = make_law(name, **MODEL)
        rows += [(name, law.pretrained, *run) for run in runs(law)]
    return Table(
        title="What happens to every distance",
        caption="For the last query of 64k tokens, model as above. Exact: every plane is rotated as in training. "
        "Compressed: rotated differently, but to angles seen in training. Unseen: some plane is rotated to an angle "
        "that it never saw in training, which is only possible for planes that did not go full circle.",
        columns=("law", "pretrained", "kind", "first", "last"),
        rows=rows,
    )


def attention() -> Table:
    """Return the library calls that compute a short text under 3D-RPE (`rpe3d.attention.blocked`), piece by piece."""
    law = make_law("3d-rpe", pretrained=16, context=24, head_dim=64, chunk=4, window=4, reach=16, focus=0, fade=0)
    tokens = range(law.context)
    calls = [call for block in schedule(law.regions, tokens, tokens, 16) for call in block.calls]
    rows = [
        (number, call.region, call.shape, call.query + step, call.rows, call.key + step, call.columns)
        for number, call in enumerate(calls, 1)
        for step in range(0, call.times * (call.step or 1), call.step or 1)
    ]
    return Table(
        title="How attention under a law runs",
        caption="24 tokens in chunks of 4 under 3D-RPE with a window of one chunk. Near pairs keep RoPE, far pairs are "
        "rotated differently; a few library calls cover both, and their parts are merged exactly.",
        columns=("call", "region", "shape", "query", "rows", "key", "columns"),
        rows=rows,
    )
