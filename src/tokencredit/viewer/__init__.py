"""See where the credit went: one self-contained HTML page, or the terminal.

Example:
    >>> import torch
    >>> from tokencredit import Rollouts
    >>> batch = Rollouts(torch.tensor([1.0, 0.0]), ["p", "p"], torch.ones(2, 3))
    >>> view(batch, credit="grpo").summary.responses
    2
"""

from tokencredit.viewer.page import PageSummary
from tokencredit.viewer.terminal import print_responses
from tokencredit.viewer.viewing import Page, save_page, view

__all__ = ["Page", "PageSummary", "print_responses", "save_page", "view"]
