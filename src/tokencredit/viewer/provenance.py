"""Where credit comes from: method, options, versions, model, tokenizer, temperature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from tokencredit.records.schema import Record

__all__ = ["Provenance"]

_FACTS = ("model", "tokenizer", "temperature", "reward_model", "entropy_source", "tokencredit")
_NAMES = {
    "reward_model": "reward model",
    "entropy_source": "entropies from",
    "tokencredit": "recorded by tokencredit",
}
_SHOWN = 3


class Provenance:
    """What records say of how they came about; where they differ, the first few values.

    Example:
        >>> provenance = Provenance()
        >>> provenance.add(Record(group=0, tokens=[], mask=[], reward=None,
        ...     meta={"model": "m", "credit": {"gtpo": {"options": {"alpha2": 0.1}}}}))
        >>> provenance.facts()
        [('model', 'm'), ('gtpo', 'alpha2=0.1')]
    """

    def __init__(self) -> None:
        self._facts: dict[str, dict[str, None]] = {}
        self._rules: dict[str, dict[str, None]] = {}
        self._steps: list[int] = []

    def add(self, record: Record) -> None:
        """Take note of one record."""
        if record.step is not None and not (self._steps and self._steps[-1] == record.step):
            self._steps.append(record.step)
        for name in _FACTS:
            if record.meta.get(name) is not None:
                self._facts.setdefault(name, {})[str(record.meta[name])] = None
        about: Any = record.meta.get("credit")
        known = cast("dict[str, Any]", about) if isinstance(about, Mapping) else {}
        for rule in dict.fromkeys([*known, *record.credit]):
            self._rules.setdefault(rule, {})[_in_words(rule, known.get(rule))] = None

    def facts(self) -> list[tuple[str, str]]:
        """Name and value, in a fixed order: what was sampled, then each rule."""
        facts = [
            (_NAMES.get(name, name), _several(list(self._facts[name])))
            for name in _FACTS
            if name in self._facts
        ]
        facts += [(rule, _several(list(words))) for rule, words in self._rules.items()]
        if self._steps:
            steps = list(dict.fromkeys(self._steps))
            text = str(steps[0]) if len(steps) == 1 else f"{min(steps)} .. {max(steps)}"
            facts.insert(0, ("step" if len(steps) == 1 else "steps", text))
        return facts


def _several(values: list[str]) -> str:
    more = len(values) - _SHOWN
    return " | ".join(values[:_SHOWN]) + (f" | {more} more" if more > 0 else "")


def _in_words(rule: str, about: Any) -> str:
    """``alpha1=1.0, alpha2=0.1 (tokencredit 0.1.0)``."""
    known = cast("dict[str, Any]", about) if isinstance(about, Mapping) else {}
    options: Any = known.get("options")
    texts: list[str] = []
    if known.get("rule") not in (None, rule):
        texts.append(f"rule {known['rule']}")
    if isinstance(options, Mapping):
        items = cast("Mapping[str, Any]", options).items()
        texts += [f"{name}={value}" for name, value in items]
    words = ", ".join(texts) or "options not recorded"
    version = known.get("version")
    return words if version is None else f"{words} (tokencredit {version})"
