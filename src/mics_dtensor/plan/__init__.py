"""What a cut of the world costs. Pure but for trace.py: no torch, no process group."""
