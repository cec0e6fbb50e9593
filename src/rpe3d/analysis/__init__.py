"""Show what a law does, as tables and pictures. Tables hold every number; drawing reads a table and adds none."""
