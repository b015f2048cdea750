"""Credit rules, one published system a file, and the registry that names them."""

from tokencredit.methods.dapo import DAPO, soft_overlong_punishment
from tokencredit.methods.datc import (
    DATC,
    DATCFlipped,
    DATCGradTimesInput,
    DATCNormProduct,
    DATCRandom,
    DATCShuffled,
)
from tokencredit.methods.grpo import GRPO, DrGRPO, grpo_advantage
from tokencredit.methods.grpo_s import GRPO_S
from tokencredit.methods.gtpo import GTPO
from tokencredit.methods.registry import Method, methods, register, resolve
from tokencredit.methods.rule import Option, Recipe, Rule, option

__all__ = [
    "DAPO",
    "DATC",
    "GRPO",
    "GRPO_S",
    "GTPO",
    "DATCFlipped",
    "DATCGradTimesInput",
    "DATCNormProduct",
    "DATCRandom",
    "DATCShuffled",
    "DrGRPO",
    "Method",
    "Option",
    "Recipe",
    "Rule",
    "grpo_advantage",
    "methods",
    "option",
    "register",
    "resolve",
    "soft_overlong_punishment",
]
