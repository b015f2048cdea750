"""Token-level credit inside verl, by configuration alone.

verl loads `tokencredit.engines.verl.plugin` itself, through the entry point group
``verl.plugins``: with both packages installed, ``algorithm.adv_estimator=tokencredit_gtpo`` is
all that a user sets. ``python -m tokencredit.engines.verl check`` says whether it works.

Run with verl 0.9.1. Importing this module imports neither verl nor Ray.
"""

from tokencredit.engines.verl.settings import (
    Setting,
    needed_overrides,
    notes,
    obstacles,
    recommended_overrides,
    setting_of,
)

__all__ = [
    "Setting",
    "needed_overrides",
    "notes",
    "obstacles",
    "recommended_overrides",
    "setting_of",
]
