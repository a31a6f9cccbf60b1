"""What the files of a checkpoint are called."""

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints, in the training folder."""
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
"""The files of a checkpoint; the last names the hashes of the others."""
