"""One thread and no network; `verl_harness` (this folder) importable by its name."""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

collect_ignore = ["verl_harness.py"]  # imports verl, which may not be there
