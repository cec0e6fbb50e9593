"""PoSE (Zhu et al. 2023, arXiv 2309.10400): short windows whose positions span a long context."""

from __future__ import annotations

import random


def skipped_positions(length: int, context: int, parts: int, draw: random.Random) -> list[int]:
    """Draw positions for a window of `length` tokens in a context, in `parts` runs that each skip ahead.

    Section 3.2: with N chunks of l_i tokens, st_i = l_0 + ... + l_(i-1), chunk i is at u_i + st_i + [0, l_i), where
    u_0 = 0 and u_i is uniform in {u_(i-1), ..., L_t - L_c}. For N = 2 the authors' code draws l_0 uniformly from
    1 .. ceil(L_c / 2); more parts are drawn as N - 1 different cuts. The text itself is left as it is (their v_i = 0).
    """
    cuts = [draw.randint(1, (length + 1) // 2)] if parts == 2 else sorted(draw.sample(range(1, length), parts - 1))
    positions: list[int] = []
    skip = 0
    for i, (start, stop) in enumerate(zip([0, *cuts], [*cuts, length], strict=True)):
        if i:
            skip = draw.randint(skip, context - length)
        positions += range(skip + start, skip + stop)
    return positions
