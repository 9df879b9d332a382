"""Checkpoints: complete or not there, written once, read once, verified (docs/checkpoints.md)."""
