"""Signals that rules need beyond rewards: the policy at each token, and a reward's gradient."""

from tokencredit.signals.alignment import (
    Alignment,
    RewardInput,
    alignment_signals,
    chat_input,
    plain_input,
    text_input,
)
from tokencredit.signals.policy import (
    PolicyHead,
    check_policy_head,
    last_hidden_states,
    policy_head,
)
from tokencredit.signals.reward_gradient import (
    GoldAnswer,
    RewardGradient,
    RewardModel,
    RewardSource,
    check_same_tokenizer,
    reward_gradients,
)
from tokencredit.signals.statistics import TokenStatistics, mean_embedding, token_statistics

__all__ = [
    "Alignment",
    "GoldAnswer",
    "PolicyHead",
    "RewardGradient",
    "RewardInput",
    "RewardModel",
    "RewardSource",
    "TokenStatistics",
    "alignment_signals",
    "chat_input",
    "check_policy_head",
    "check_same_tokenizer",
    "last_hidden_states",
    "mean_embedding",
    "plain_input",
    "policy_head",
    "reward_gradients",
    "text_input",
    "token_statistics",
]
