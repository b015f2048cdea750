"""Signals that rules need beyond rewards: statistics of the policy at each token."""

from tokencredit.signals.statistics import TokenStatistics, token_statistics

__all__ = ["TokenStatistics", "token_statistics"]
