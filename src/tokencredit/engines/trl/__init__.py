"""Token-level credit inside TRL's GRPOTrainer: `CreditGRPOTrainer`, or the mixin it is made of.

Needs the extra ``trl``. Run with TRL 1.14.2 and 1.16.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokencredit.errors import MissingExtraError

if TYPE_CHECKING:
    from tokencredit.engines.trl.event import CreditEvent
    from tokencredit.engines.trl.guards import apply_requirements, recommended_config
    from tokencredit.engines.trl.mixin import TokenCreditMixin
    from tokencredit.engines.trl.recording import RolloutRecorder
    from tokencredit.engines.trl.trainer import CreditGRPOTrainer

__all__ = [
    "CreditEvent",
    "CreditGRPOTrainer",
    "RolloutRecorder",
    "TokenCreditMixin",
    "apply_requirements",
    "recommended_config",
]

_HOMES = {
    "CreditEvent": "event",
    "CreditGRPOTrainer": "trainer",
    "RolloutRecorder": "recording",
    "TokenCreditMixin": "mixin",
    "apply_requirements": "guards",
    "recommended_config": "guards",
}


def __getattr__(name: str) -> Any:
    """Import TRL only when something of this module is used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib
    import importlib.util

    if importlib.util.find_spec("trl") is None:
        raise MissingExtraError("trl", "trl", f"tokencredit.engines.trl.{name}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
