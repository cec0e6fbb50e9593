"""Positions to angles: every law as a frozen value, and the theory of the paper for any of them."""

from rpe3d.geometry.law import Law
from rpe3d.geometry.region import Fade, PairTurns, Phase, Region, Steps, Turn
from rpe3d.geometry.registry import DEFAULT, LAWS, LawInfo, laws, make_law, saved_law, styles
from rpe3d.geometry.spec import LawSpec, parse_law, parse_laws, read_law
from rpe3d.geometry.theory import (
    bloch_state,
    bloch_vector,
    decay_bound,
    relative_position_matrix,
    resolution,
    score_bound,
)

__all__ = [
    "DEFAULT",
    "LAWS",
    "Fade",
    "Law",
    "LawInfo",
    "LawSpec",
    "PairTurns",
    "Phase",
    "Region",
    "Steps",
    "Turn",
    "bloch_state",
    "bloch_vector",
    "decay_bound",
    "laws",
    "make_law",
    "parse_law",
    "parse_laws",
    "read_law",
    "relative_position_matrix",
    "resolution",
    "saved_law",
    "score_bound",
    "styles",
]
