"""Time and memory against real peers: the same work, in one run. ``python -m benchmarks``."""
