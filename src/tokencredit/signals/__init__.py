"""Signals that rules need beyond rewards: statistics of the policy at each token."""
