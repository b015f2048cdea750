"""What verl loads through the entry point group ``verl.plugins``: importing it does everything.

verl imports it in every process that imports verl: the driver, where estimators run, and the
workers, where policy losses do. A fault in here is swallowed by verl, at DEBUG level;
``python -m tokencredit.engines.verl check`` shows it.
"""

from tokencredit.engines.verl.estimators import register_estimators
from tokencredit.engines.verl.surrogates import register_policy_losses
from tokencredit.engines.verl.taps import attach

__all__ = ["ESTIMATORS", "LOSSES", "TAPS"]

ESTIMATORS = register_estimators()
"""Estimator names registered with verl, and the methods behind them."""

LOSSES = register_policy_losses()
"""Policy losses registered with verl."""

TAPS = attach()
"""For each trainer, "" where the tap is attached, else why it is not."""
