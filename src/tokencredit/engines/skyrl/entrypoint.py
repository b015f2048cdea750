"""SkyRL's main job with `credit_trainer`, and with ``trainer.algorithm.tokencredit`` for options.

``trainer.override_entrypoint=tokencredit.engines.skyrl.entrypoint`` makes SkyRL's own command
start this; ``python -m tokencredit.engines.skyrl`` is the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from skyrl.train.config import AlgorithmConfig, make_config
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils import initialize_ray, validate_cfg

from tokencredit.engines.skyrl.estimators import register
from tokencredit.engines.skyrl.settings import obstacles, setting_of
from tokencredit.engines.skyrl.trainer import credit_trainer
from tokencredit.errors import InputError

__all__ = ["CreditAlgorithmConfig", "CreditExp", "main", "read_config"]

OVERRIDE = "trainer.override_entrypoint="


@dataclass
class CreditAlgorithmConfig(AlgorithmConfig):
    """SkyRL's, with a place for the options of a credit rule."""

    tokencredit: dict[str, Any] = field(default_factory=dict)


class CreditExp(BasePPOExp):
    """SkyRL's experiment with `credit_trainer`."""

    def get_trainer(self, *args: Any, **kwargs: Any) -> Any:
        """SkyRL's trainer, feeding tokencredit's estimators."""
        return credit_trainer(RayPPOTrainer)(*args, **kwargs)


def read_config(argv: Sequence[str]) -> Any:
    """SkyRL's configuration from the command line, validated.

    Raises:
        InputError: what keeps the method from working, before anything is loaded.
    """
    kept = [arg for arg in argv if not arg.startswith(OVERRIDE)]
    cfg = make_config(algorithm_cls=CreditAlgorithmConfig).from_cli_overrides(kept)
    setting = setting_of(cfg.trainer.algorithm, register())
    found = [] if setting is None else obstacles(cfg, setting)
    if found:
        raise InputError("; ".join(found))
    validate_cfg(cfg)
    return cfg


@ray.remote(num_cpus=1)
def _run(cfg: Any) -> None:
    CreditExp(cfg).run()


USAGE = """\
usage: python -m tokencredit.engines.skyrl key=value ...

SkyRL's training job (skyrl.train.entrypoints.main_base) with token-level credit. Keys are SkyRL's,
trainer.algorithm.advantage_estimator=tokencredit_gtpo among them, and
trainer.algorithm.tokencredit.OPTION=VALUE for options of the method.
"""


def main() -> None:
    """What SkyRL's own ``main`` does, with the classes of this module."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(USAGE)
        return
    try:
        cfg = read_config(sys.argv[1:])
    except InputError as error:
        print(f"tokencredit: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    initialize_ray(cfg)
    ray.get(_run.remote(cfg))
