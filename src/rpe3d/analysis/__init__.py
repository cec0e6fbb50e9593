"""What a law does, as tables and pictures. Tables hold every number; drawing reads a table and adds none."""

from rpe3d.analysis.decay import Row, decay_table, draw_decay, figure_table

__all__ = ["Row", "decay_table", "draw_decay", "figure_table"]
