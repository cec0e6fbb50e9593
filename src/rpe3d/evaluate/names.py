"""Choose short names for pages: a law with its own parameters is called by its name and a number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

LONGEST = 18
"""Characters of a label that fit in a plot."""


def short_names(labels: Iterable[str]) -> dict[str, str]:
    """Return the name of each label on a page: itself, or a short name that no other label has."""
    labels = list(dict.fromkeys(labels))
    names = {label: label for label in labels if len(label) <= LONGEST}
    for label in labels:
        if label not in names:
            base = label.partition(":")[0][: LONGEST - 3]
            numbered = (f"{base} {number}" for number in range(1, len(labels) + 1))
            names[label] = next(name for name in numbered if name not in (*labels, *names.values()))
    return {label: names[label] for label in labels}


def with_short_names(results: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return results whose laws have short names, and the full label behind every changed name."""
    settings = results["settings"]
    names = short_names([*settings.get("laws", ()), *(row["law"] for row in results["rows"])])
    told = {**results, "rows": [{**row, "law": names[row["law"]]} for row in results["rows"]]}
    if "laws" in settings:
        told["settings"] = {**settings, "laws": [names[label] for label in settings["laws"]]}
    for length, found in results.get("keys", {}).items():
        by = {**found["by"], "laws": [names.get(law, law) for law in found["by"]["laws"]]}
        left = [names.get(law, law) for law in found["left_out"]]
        told["keys"] = {**told["keys"], length: {**found, "by": by, "left_out": left}}
    return told, {name: label for label, name in names.items() if name != label}
