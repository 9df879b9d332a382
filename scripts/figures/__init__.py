"""The figures of the documentation, drawn by the code they explain: `python -m scripts.figures`.

Ranks, groups and bytes come from `Layout` and `plan/traffic.py`; a test holds the files current.
"""
