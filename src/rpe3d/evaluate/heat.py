"""Draw heat maps of an evaluation: the share of answers found at each depth of the prompt and each length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rpe3d.evaluate.plots import Panel, Plot, drawing_cells

MOST = 11
"""Maximum rows of a map; more depths are rounded to tenths."""
NAMES = {
    "needle": "Needle in a haystack",
    "passkey": "Passkeys",
    "kv": "Key-value retrieval",
    "infinitebench": "InfiniteBench",
}
LETTER = 7.0
"""Width of a letter in a panel's title, in points: panels are as wide as the longest name of a law."""
Cells = dict[tuple[int, float], tuple[float, int]]
"""By length and depth: the number of right answers, and of all answers."""


def heat_maps(results: Mapping[str, Any]) -> list[Plot]:
    """Return a map for every task whose rows have depths, with a panel for each law; all share one scale."""
    tasks: dict[tuple[str, str], dict[str, Cells]] = {}
    for row in results["rows"]:
        depths = row.get("parts", {}).get("depth") if row["status"] == "ok" else None
        if depths:
            cells = tasks.setdefault((row["suite"], row["task"]), {}).setdefault(row["law"], {})
            cells |= {(row["length"], int(depth) / 100): (score * n / 100, n) for depth, (score, n) in depths.items()}
    return [_map(suite, task, laws) for (suite, task), laws in tasks.items()]


def _map(suite: str, task: str, laws: Mapping[str, Cells]) -> Plot:
    lengths = sorted({length for cells in laws.values() for length, _ in cells})
    if len({depth for cells in laws.values() for _, depth in cells}) > MOST:
        laws = {law: _gathered(cells) for law, cells in laws.items()}
    depths = sorted({depth for cells in laws.values() for _, depth in cells})
    width = max(64 + 30 * len(lengths), 40 + LETTER * max(map(len, laws)))
    panels = [_panel(law, cells, lengths, depths, width) for law, cells in laws.items()]
    name = NAMES.get(suite, suite) + (f", {task}" if suite == "infinitebench" else "")
    trials = sorted({n for cells in laws.values() for _, n in cells.values()})
    caption = (
        f"{name}: percent of right answers, in number and colour, on one scale for every law and length. Depth 0 % is "
        "the beginning of the prompt, farthest from the question. "
        f"Samples in a cell: {trials[0] if len(trials) == 1 else f'{trials[0]} to {trials[-1]}'}."
    )
    return Plot(name="-".join(filter(None, (suite, task))), caption=caption, panels=panels)


def _gathered(cells: Cells) -> Cells:
    """Return the cells with their depths rounded to tenths."""
    found: Cells = {}
    for (length, depth), (right, n) in cells.items():
        place = length, round(depth, 1)
        before = found.get(place, (0.0, 0))
        found[place] = before[0] + right, before[1] + n
    return found


def _panel(law: str, cells: Cells, lengths: list[int], depths: list[float], width: float) -> Panel:
    shown = {place: (right / n, f"{100 * right / n:.0f}") for place, (right, n) in cells.items()}
    means = []
    for length in lengths:
        some = [cell for (at, _), cell in cells.items() if at == length]
        if some:
            share = 100 * sum(right for right, _ in some) / sum(n for _, n in some)
            means.append(f"{share:.0f} percent at {length} tokens")
    return Panel(
        title=law,
        alt=f"Heat map of right answers of {law}, depth against length: {', '.join(means)}.",
        size=(width, 44 + 17 * len(depths)),
        draw=drawing_cells(shown, lengths, depths),
    )
