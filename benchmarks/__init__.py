"""Measurements: an emulated cluster on one machine, and this library beside its peers on it."""
