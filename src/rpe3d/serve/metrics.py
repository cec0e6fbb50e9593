"""Publish the law in the metrics of vLLM's server: `rpe3d_law_info{law="3d-rpe", context="65536", ...} 1` at /metrics.

`rpe3d serve` passes the law to the server's processes in an environment variable, and the plugin enters it into the
registry that vLLM publishes. Of vLLM's own hooks, only logger plugins see the config where the server runs, and
installing one would switch statistics on for every model: a server started without `rpe3d serve` does not name its law.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from typing import Any

from rpe3d.geometry import Law

VARIABLE = "RPE3D_SERVED_LAW"
NAME = "rpe3d_law_info"


def labels(law: Law) -> dict[str, str]:
    """Return a law's name, context and parameters as labels."""
    given = law.to_dict()
    given["law"] = given.pop("name")
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}


def environment(law: Law) -> dict[str, str]:
    """Return the environment variables of a server under a law."""
    return {VARIABLE: json.dumps(labels(law))}


def told_law(law: Law | None) -> bool:
    """Return whether a law is the one that this process was told of; True if it was told of none."""
    told = os.environ.get(VARIABLE)
    return told is None or (law is not None and labels(law) == json.loads(told))


def install() -> None:
    """Enter the law that this process was told of into the registry; do nothing if it was told of none."""
    if told := os.environ.get(VARIABLE):
        _gauge(told).set(1)


@lru_cache(maxsize=1)
def _gauge(told: str) -> Any:
    """Return the gauge with the law's labels. A gauge: several processes cannot publish what Prometheus calls Info."""
    from prometheus_client import Gauge

    named = json.loads(told)
    about = "The position law that the model is served under."
    return Gauge(NAME, about, labelnames=sorted(named), multiprocess_mode="mostrecent").labels(**named)
