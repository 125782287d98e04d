"""Pagoda from Python: `pagoda.export` makes model folders out of trained checkpoints."""

__version__ = "0.1.0"
