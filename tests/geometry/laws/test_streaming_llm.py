"""StreamingLLM against a cache that is rolled token by token."""

from __future__ import annotations

from law_oracles import (
    KEY,
    MODEL,
    QUERY,
)
from rpe3d import make_law


def test_streaming_llm_counts_positions_inside_its_cache():
    """Xiao et al. 2023: roll the cache token by token and number what is in it, as their code does."""
    law = make_law("streaming-llm", sinks=3, window=10, **MODEL)
    f = law.relative_position(QUERY, KEY)
    for query in (0, 2, 3, 9, 12, 13, 14, 40, 511):
        cache = [k for k in range(query + 1) if k < 3 or query - k < 10]
        place = {k: slot for slot, k in enumerate(cache)}
        for key in range(query + 1):
            if key in place:
                assert f[query, key] == place[query] - place[key]
            else:
                assert f[query, key].isnan()


def test_streaming_llm_without_sinks_is_a_window():
    law = make_law("streaming-llm", sinks=0, window=10, **MODEL)
    assert law.relative_position(20, 11) == 9
    assert law.relative_position(20, 10).isnan()
