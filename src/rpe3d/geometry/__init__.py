"""Positions to angles: every law as a frozen value, and the theory of the paper for any of them."""

from rpe3d.geometry.law import Law
from rpe3d.geometry.plan import Fade, PairTurns, Phase, Region, Turn
from rpe3d.geometry.registry import LAWS, LawInfo, laws, make_law
from rpe3d.geometry.theory import (
    bloch_state,
    bloch_vector,
    decay_bound,
    relative_position_matrix,
    resolution,
    score_bound,
)

__all__ = [
    "LAWS",
    "Fade",
    "Law",
    "LawInfo",
    "PairTurns",
    "Phase",
    "Region",
    "Turn",
    "bloch_state",
    "bloch_vector",
    "decay_bound",
    "laws",
    "make_law",
    "relative_position_matrix",
    "resolution",
    "score_bound",
]
