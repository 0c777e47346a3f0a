"""A performance model of distributed deep-learning training."""

__version__ = "0.1.0"
