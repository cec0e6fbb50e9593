"""A page to explore laws: every number on it comes from the library, requested live or computed beforehand."""
