"""farside: train in one region on data that stays in another."""

__version__ = "0.1.0"
