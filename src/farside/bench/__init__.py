"""Measuring: an emulated link, a training-like load, and the demo that compares hub with spoke."""
