"""Measure how far a model stretches: perplexity, copying and passkeys under every law."""

from rpe3d.evaluate.compare import compare
from rpe3d.evaluate.settings import Settings
from rpe3d.evaluate.tasks.perplexity import perplexity
from rpe3d.evaluate.tasks.retrieval import copy_nll, make_copy, make_passkey, passkey
from rpe3d.evaluate.texts import Text, Tokens, default_texts, read_texts, tokenize
from rpe3d.evaluate.tune import Tuned, tune

__all__ = [
    "Settings",
    "Text",
    "Tokens",
    "Tuned",
    "compare",
    "copy_nll",
    "default_texts",
    "make_copy",
    "make_passkey",
    "passkey",
    "perplexity",
    "read_texts",
    "tokenize",
    "tune",
]
