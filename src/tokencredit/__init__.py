"""Fine-grained credit assignment for reinforcement learning of language models.

Response-level advantages in, token-level ones out, by published methods. See `assign` and
`methods`; `tokencredit.engines.trl` puts them into TRL's GRPOTrainer.
"""

from importlib.metadata import PackageNotFoundError, version

from tokencredit.credit import Credit, assign, finish
from tokencredit.errors import (
    InputError,
    MissingExtraError,
    MissingSignalError,
    TokenCreditError,
)
from tokencredit.losses import Surrogate, importance_ratio, loss_denominator, policy_loss
from tokencredit.methods import (
    DAPO,
    DATC,
    GRPO,
    GRPO_S,
    GTPO,
    DrGRPO,
    Method,
    Option,
    Recipe,
    Rule,
    grpo_advantage,
    methods,
    option,
    register,
    resolve,
    soft_overlong_punishment,
)
from tokencredit.rollouts import Rollouts
from tokencredit.viewer import view

try:
    __version__ = version("tokencredit")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = [
    "DAPO",
    "DATC",
    "GRPO",
    "GRPO_S",
    "GTPO",
    "Credit",
    "DrGRPO",
    "InputError",
    "Method",
    "MissingExtraError",
    "MissingSignalError",
    "Option",
    "Recipe",
    "Rollouts",
    "Rule",
    "Surrogate",
    "TokenCreditError",
    "__version__",
    "assign",
    "finish",
    "grpo_advantage",
    "importance_ratio",
    "loss_denominator",
    "methods",
    "option",
    "policy_loss",
    "register",
    "resolve",
    "soft_overlong_punishment",
    "view",
]
