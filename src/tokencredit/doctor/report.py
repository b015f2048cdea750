"""What the doctor says: findings, and how they are collected."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from tokencredit.texts import printable

__all__ = ["Diagnosis", "Finding", "Place", "Tally"]

Severity = Literal["fault", "note"]


@dataclass(frozen=True)
class Place:
    """Where in a file an example is.

    Attributes:
        file: the file's name, as it was given.
        line: its line, from 1.
        response: the index of the response in its group, from 0.
        token: the index of the token in its response, from 0; None = the response as a whole.
        detail: what is there.

    Example:
        >>> str(Place("a.jsonl", 3, 1, 0, "entropy -0.5"))
        'a.jsonl:3, response 1, token 0: entropy -0.5'
    """

    file: str
    line: int
    response: int
    token: int | None
    detail: str

    def __str__(self) -> str:
        """The place on one line."""
        token = "" if self.token is None else f", token {self.token}"
        return f"{self.file}:{self.line}, response {self.response}{token}: {self.detail}"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a file, or worth knowing.

    Attributes:
        code: which check: `mask`, `entropy`, `logprob`, `temperature`, `sampler`, `credit`,
            `variance`, `success`, `truncated`, `repeated`.
        severity: `fault` = something is wrong; `note` = worth knowing, changes no exit code.
        what: what was found.
        count: how many.
        of: out of how many.
        unit: of what: `responses`, `tokens` or `groups`.
        example: one place; None where the finding is about the file as a whole.
        advice: what to do.

    Example:
        >>> finding = Finding("entropy", "fault", "negative entropies", 1, 8, "tokens", None,
        ...                   "compute them again")
        >>> print(finding)
        fault  entropy: negative entropies (1 of 8 tokens)
               do: compute them again
    """

    code: str
    severity: Severity
    what: str
    count: int
    of: int
    unit: str
    example: Place | None
    advice: str

    def __str__(self) -> str:
        """The finding on two or three lines."""
        share = f"({self.count} of {self.of} {self.unit})"
        lines = [f"{self.severity:<5}  {self.code}: {self.what} {share}"]
        if self.example is not None:
            lines.append(f"at: {self.example}")
        lines.append(f"do: {self.advice}")
        return "\n       ".join(map(printable, lines))


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found in a file.

    Attributes:
        file: the file's name.
        responses: how many responses it holds.
        groups: how many groups.
        tokens: how many tokens are inside the masks.
        findings: faults first, then notes.

    Example:
        >>> Diagnosis("a.jsonl", 8, 2, 40, ()).clean
        True
    """

    file: str
    responses: int
    groups: int
    tokens: int
    findings: tuple[Finding, ...]

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that are faults."""
        return tuple(f for f in self.findings if f.severity == "fault")

    @property
    def notes(self) -> tuple[Finding, ...]:
        """The findings that are notes."""
        return tuple(f for f in self.findings if f.severity == "note")

    @property
    def clean(self) -> bool:
        """Whether there is no fault; notes are allowed."""
        return not self.faults

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values for JSON.

        Example:
            >>> sorted(Diagnosis("a.jsonl", 8, 2, 40, ()).as_dict())
            ['clean', 'file', 'findings', 'groups', 'responses', 'tokens']
        """
        return {
            "file": self.file,
            "clean": self.clean,
            "responses": self.responses,
            "groups": self.groups,
            "tokens": self.tokens,
            "findings": [asdict(finding) for finding in self.findings],
        }

    def __str__(self) -> str:
        """The report that the command line prints."""
        lines = [
            f"{self.file}: {self.responses} responses, {self.groups} groups, {self.tokens} tokens"
        ]
        lines += map(str, self.findings)
        faults, notes = len(self.faults), len(self.notes)
        lines.append(
            f"{faults or 'no'} fault{'' if faults == 1 else 's'}"
            + (f", {notes} note{'' if notes == 1 else 's'}" if notes else "")
        )
        return "\n".join(lines)


class Tally:
    """Counts one thing, and keeps the first place where it was seen."""

    def __init__(self) -> None:
        self.count = 0
        self.place: Place | None = None

    def add(self, place: Place, count: int = 1) -> None:
        """Seen once more, or several times."""
        self.count += count
        self.place = self.place or place

    def merge(self, other: Tally) -> None:
        """Add what another one, of later places, has counted."""
        self.count += other.count
        self.place = self.place or other.place
