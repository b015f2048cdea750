"""The tasks: small, verifiable, and with the truth about every token known."""

from __future__ import annotations

from tokencredit.lab.tasks.chain import Chain
from tokencredit.lab.tasks.countdown import Countdown
from tokencredit.lab.tasks.task import Kind, Task, Verdict, context_length, oracle_marks

__all__ = ["Chain", "Countdown", "Kind", "Task", "Verdict", "context_length", "oracle_marks"]
