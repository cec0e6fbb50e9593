"""A page to explore laws: every number on it comes from the library, asked for live or computed beforehand."""
