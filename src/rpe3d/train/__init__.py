"""Fine-tuning under a law: the paper's recipe, from a laptop to a cluster."""

from rpe3d.train.merge import merge
from rpe3d.train.run import train
from rpe3d.train.settings import Settings, read_recipe

__all__ = ["Settings", "merge", "read_recipe", "train"]
