"""Fit as much as possible into a context, and spread what samples hide along it."""

from __future__ import annotations

from collections.abc import Callable


def most(fits: Callable[[int], bool], least: int) -> int | None:
    """Return the largest number that fits, from `least` on, or None if `least` does not; more must never fit better."""
    if not fits(least):
        return None
    low, high = least, 2 * least + 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def spread(count: int, depths: int) -> list[float]:
    """Return the depth of each of `count` samples, in [0, 1]: at most `depths` places, evenly from end to end."""
    places = min(count, depths)
    if places == 1:
        return [0.5] * count
    return [(number * places // count) / (places - 1) for number in range(count)]
