"""Colours and the shared parts of plots. This package knows nothing about laws."""
