"""Only `test_loop.py` is a test; the rest is for the processes that it starts."""

collect_ignore = ["cpu_platform.py", "generating.py", "loop.py", "tiny.py"]
