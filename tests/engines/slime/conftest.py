"""`slime_harness` (this folder) importable by its name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

collect_ignore = ["slime_ranks.py"]  # a script for `torch.distributed.run`
