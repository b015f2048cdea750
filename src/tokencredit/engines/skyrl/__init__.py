"""Token-level credit inside SkyRL: estimators, policy losses, and the trainer that feeds them.

    python -m tokencredit.engines.skyrl trainer.algorithm.advantage_estimator=tokencredit_gtpo ...

in place of ``python -m skyrl.train.entrypoints.main_base ...``, or, with the latter,
``trainer.override_entrypoint=tokencredit.engines.skyrl.entrypoint``. An entry point of your own
calls `register` before ``validate_cfg`` and makes `credit_trainer` of its trainer.

Run with SkyRL 0.3.0, on CPU. Importing this module imports neither SkyRL nor Ray.
"""

from tokencredit.engines.skyrl.estimators import register
from tokencredit.engines.skyrl.settings import (
    Setting,
    needed_overrides,
    notes,
    obstacles,
    recommended_overrides,
    setting_of,
)
from tokencredit.engines.skyrl.trainer import credit_trainer

__all__ = [
    "Setting",
    "credit_trainer",
    "needed_overrides",
    "notes",
    "obstacles",
    "recommended_overrides",
    "register",
    "setting_of",
]
