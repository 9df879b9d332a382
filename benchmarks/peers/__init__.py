"""Adapters to other libraries, each run in an environment of its own."""
