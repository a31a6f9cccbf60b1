"""Measurements of the figures that this project claims; each prints a table and JSON."""
