"""Makes the tests here importable by one another."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
