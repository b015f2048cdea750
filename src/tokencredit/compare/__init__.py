"""What several credit rules would do to the same rollouts.

`compare` is a pure function from `Rollouts` and rules to a `Comparison`. `read_rollouts` reads a
file of records for it, `text_table` and `html_report` show the result, `draw` and
`write_comparison` put figures and the report into a folder.

Example:
    >>> import torch
    >>> from tokencredit import Rollouts
    >>> rollouts = Rollouts(
    ...     torch.tensor([1.0, 1.0, 0.0, 0.0]), ["p"] * 4, torch.ones(4, 2),
    ...     entropy=torch.tensor([[3.0, 1.0], [1.0, 3.0], [4.0, 1.0], [1.0, 4.0]]),
    ... )
    >>> result = compare(rollouts, ["grpo", "gtpo", "datc"])
    >>> result.names, [missing.name for missing in result.missing]
    (('grpo', 'gtpo'), ['datc'])
    >>> round(result.pair("grpo", "gtpo").correlation, 3), result.method("gtpo").laws_failed
    (0.894, ())
"""

from tokencredit.compare.comparing import (
    Comparison,
    MethodSummary,
    MissingMethod,
    Pair,
    Profile,
    compare,
    default_rules,
)
from tokencredit.compare.drawing import draw
from tokencredit.compare.laws import LAWS, Law, LawResult, check_laws
from tokencredit.compare.reading import ReadRollouts, read_rollouts
from tokencredit.compare.reporting import html_report, text_table, write_comparison
from tokencredit.compare.statistics import average_ranks, moved_share, spearman

__all__ = [
    "LAWS",
    "Comparison",
    "Law",
    "LawResult",
    "MethodSummary",
    "MissingMethod",
    "Pair",
    "Profile",
    "ReadRollouts",
    "average_ranks",
    "check_laws",
    "compare",
    "default_rules",
    "draw",
    "html_report",
    "moved_share",
    "read_rollouts",
    "spearman",
    "text_table",
    "write_comparison",
]
