"""What every test shares: one thread, and `batches` (this folder) importable by its name."""

import sys
from pathlib import Path

import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)
# The same examples in every run, and no limit on a slow machine.
settings.register_profile("tokencredit", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("tokencredit")
