"""The record: one response of a rollout, as one line of JSON.

`Record` is what every part of the project passes around, and `parse_record` and `to_json` are
the only way between it and a file. A record is checked when it is made, whether it comes from a
line or from Python, so whatever exists can be written and read back unchanged.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

from tokencredit.errors import InputError, nearest

__all__ = ["SCHEMA", "CreditRecord", "Record", "RecordError", "parse_record", "to_json"]

SCHEMA = 1
"""The version of the record that this release reads and writes."""

_LARGEST_TOKEN_ID = 2**63 - 1
# Python refuses to print integers of more than 4300 digits; nothing a record needs comes close.
_LARGEST_INT_BITS = 1024
_DEEPEST = 64
# An unknown key this similar to a field that is absent is taken for a misspelling of it.
_MISSPELT = 0.8

_Message = Mapping[str, Any]


class RecordError(InputError):
    """A record, or a line of a file, that is not as the format says.

    Args:
        field: which field, `"signals.entropy[3]"`; empty if it is the line as a whole.
        problem: what is wrong with it and what to do.
        where: the file and the line, or `"record"` for one made in Python.

    Example:
        >>> str(RecordError("mask", "is missing", "rollouts.jsonl:12"))
        "rollouts.jsonl:12: field 'mask': is missing"
    """

    def __init__(self, field: str, problem: str, where: str = "record") -> None:
        place = f" field '{field}':" if field else ""
        super().__init__(f"{where}:{place} {problem}")
        self.where = where
        self.field = field
        self.problem = problem

    def __reduce__(self) -> tuple[type[RecordError], tuple[str, str, str]]:
        return type(self), (self.field, self.problem, self.where)


@dataclass(frozen=True, kw_only=True)
class CreditRecord:
    """What one credit rule gave to one response.

    Args:
        base: the response-level advantage before any shaping; None = unknown.
        reward: the shaped reward of rules that act on rewards: one number a token, one for the
            whole response, or None.
        weight: advantage over base of rules that multiply, one number a token, or None.
        advantage: what the loss multiplies, one number a token: 0 outside the mask, None where
            unknown.

    Sequences are kept as tuples; NaN becomes None; infinities are refused.

    Example:
        >>> CreditRecord(base=1.0, advantage=[0.5, float("nan")]).advantage
        (0.5, None)
    """

    base: float | None = None
    reward: Sequence[float | None] | float | None = None
    weight: Sequence[float | None] | None = None
    advantage: Sequence[float | None] | None = None

    def __post_init__(self) -> None:
        _set(self, "base", _number("base", self.base))
        reward = self.reward
        if isinstance(reward, Sequence):
            _set(self, "reward", _numbers("reward", reward))
        else:
            _set(self, "reward", _number("reward", reward))
        for name in ("weight", "advantage"):
            values: object = getattr(self, name)
            _set(self, name, None if values is None else _numbers(name, values))


@dataclass(frozen=True, kw_only=True)
class Record:
    """One response: what was sampled, what it scored, and which credit it was given.

    Args:
        group: the responses of one prompt; text or an integer, unique in a file.
        mask: one 0 or 1 a token, 1 = the policy chose this token.
        reward: the scalar reward; None = not scored.
        token_ids: the ids of the response's tokens. Either these or `tokens` are required.
        tokens: the text of each token; a token that is not valid UTF-8 alone is `bytes` (in the
            file: a list of byte values).
        schema: the version of the format.
        step: the training step; records of one step are one batch.
        prompt_id: the prompt in the data set.
        prompt: text, or a list of messages (each an object with a `role`).
        prompt_token_ids: the ids of the prompt's tokens.
        response: the text of the response.
        rewards: each reward function's own value by name; None = that one did not score.
        success: whether the response solved its task; None = not said.
        keep: False = counts in the group's statistics but not in the loss.
        truncated: the response was cut at the length limit. A fact only: it has no effect on the
            loss unless `keep` is False as well.
        signals: one number a token by name; None = unknown at that token, which is not 0.
        credit: what each rule gave, by the rule's name.
        meta: anything JSON can hold: model, tokenizer, temperature, rule options, version.
        extra: the top-level keys of the line that this version does not know, kept as they are.

    Token arrays align with `token_ids` (with `tokens` where there are no ids). Sequences are kept
    as tuples and mappings are copied. NaN becomes None, infinities are refused. A pair of
    surrogates in a text is replaced by the character it stands for, as JSON cannot tell the two
    apart; a lone surrogate stays.

    Raises:
        RecordError: a field has the wrong type, length or value, or an unknown key in `extra` is a
            near miss of a field that is not there.

    Example:
        >>> record = Record(group="a", token_ids=[5, 7], mask=[1, 1], reward=1.0)
        >>> record.length, record.mask
        (2, (1, 1))
        >>> Record(group="a", token_ids=[5, 7], mask=[1], reward=1.0)
        Traceback (most recent call last):
        ...
        tokencredit.records.schema.RecordError: record: field 'mask': has 1 value, but the record \
has 2 token_ids; give one a token
    """

    group: str | int
    mask: Sequence[int]
    reward: float | None
    token_ids: Sequence[int] | None = None
    tokens: Sequence[str | bytes] | None = None
    schema: int = SCHEMA
    step: int | None = None
    prompt_id: str | int | None = None
    prompt: str | Sequence[_Message] | None = None
    prompt_token_ids: Sequence[int] | None = None
    response: str | None = None
    rewards: Mapping[str, float | None] = field(default_factory=dict[str, "float | None"])
    success: bool | None = None
    keep: bool | None = None
    truncated: bool | None = None
    signals: Mapping[str, Sequence[float | None]] = field(
        default_factory=dict[str, "Sequence[float | None]"]
    )
    credit: Mapping[str, CreditRecord] = field(default_factory=dict[str, CreditRecord])
    meta: Mapping[str, Any] = field(default_factory=dict[str, Any])
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            _set(self, name, check(name, getattr(self, name)))
        if self.token_ids is None and self.tokens is None:
            raise RecordError(
                "token_ids", "is missing, and so is 'tokens'; a record needs one of them"
            )
        if self.token_ids is not None and self.tokens is not None:
            self._check_length("tokens", self.tokens)
        self._check_length("mask", self.mask)
        for name, values in self.signals.items():
            self._check_length(f"signals.{name}", values)
        for rule, credit in self.credit.items():
            for name in ("reward", "weight", "advantage"):
                values: object = getattr(credit, name)
                if isinstance(values, tuple):
                    self._check_length(f"credit.{rule}.{name}", cast("tuple[object, ...]", values))
        for key in self.extra:
            if meant := self._misspelt(key):
                raise RecordError(
                    key, f"is not a field (did you mean {meant!r}?); rename it, or put it in 'meta'"
                )

    @property
    def length(self) -> int:
        """How many tokens the response has, masked or not.

        Example:
            >>> Record(group=0, tokens=["a", "b"], mask=[1, 0], reward=None).length
            2
        """
        return len(self.mask)

    def _check_length(self, name: str, values: Sequence[object]) -> None:
        aligned = "token_ids" if self.token_ids is not None else "tokens"
        length = len(self.token_ids if self.token_ids is not None else self.tokens or ())
        if len(values) != length:
            count = f"{len(values)} value" + ("" if len(values) == 1 else "s")
            raise RecordError(
                name, f"has {count}, but the record has {length} {aligned}; give one a token"
            )

    def _misspelt(self, key: str) -> str | None:
        """The absent field that an unknown key was probably meant to be."""
        if key in _ORDER:
            return key
        absent = [name for name in _ORDER if getattr(self, name) in (None, {})]
        close = difflib.get_close_matches(key.lower(), absent, n=1, cutoff=_MISSPELT)
        return close[0] if close else None


def parse_record(obj: object, where: str) -> Record:
    """The record that a decoded line of JSON holds, with every field checked.

    Unknown top-level keys are kept in `Record.extra`, so that a file passes through unchanged,
    except a near miss of a field that is absent (`"sucess"`), which would be lost in silence.
    Unknown keys inside `credit` are refused.

    Args:
        obj: what `json.loads` gave for the line.
        where: the file and the line, `"rollouts.jsonl:12"`, put before every message.

    Raises:
        RecordError: the line is not a record; the message names the field.

    Example:
        >>> line = {"schema": 1, "group": "a", "token_ids": [5], "mask": [1], "reward": None}
        >>> parse_record(line, "rollouts.jsonl:1").reward is None
        True
        >>> parse_record({**line, "mask": [2]}, "a.jsonl:1")
        Traceback (most recent call last):
        ...
        tokencredit.records.schema.RecordError: a.jsonl:1: field 'mask[0]': expected 0 or 1, got 2
    """
    try:
        return Record(**_arguments(obj))
    except RecordError as error:
        raise RecordError(error.field, error.problem, where) from None


def to_json(record: Record) -> str:
    r"""The record as one line of JSON, without the line feed; `parse_record` reads it back.

    The record that is read back is equal to this one.

    Keys come in a fixed order, optional fields that are absent are left out, and `reward` is
    always there. Text is written as it is, apart from lone surrogates and the Unicode line
    separators, which are escaped: no UTF-8 exists for the first, and some tools break lines at
    the others.

    Example:
        >>> to_json(Record(group="a", tokens=["h\u00e9", b"\xe4\xbd"], mask=[1, 1], reward=1))
        '{"schema":1,"group":"a","tokens":["hé",[228,189]],"mask":[1,1],"reward":1.0}'
    """
    line: dict[str, object] = {}
    for name in _ORDER:
        value: object = getattr(record, name)
        if name == "tokens" and record.tokens is not None:
            value = [list(t) if isinstance(t, bytes) else t for t in record.tokens]
        elif name == "credit":
            value = {
                rule: {key: getattr(credit, key) for key in _CREDIT_KEYS}
                for rule, credit in record.credit.items()
            }
        if name == "reward" or value not in (None, {}):
            line[name] = value
    line.update(record.extra)
    text = json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


_ESCAPED = re.compile("[\ud800-\udfff\u0085\u2028\u2029]")


def _arguments(obj: object) -> dict[str, Any]:
    """The arguments of `Record` that a decoded line stands for."""
    if not isinstance(obj, dict):
        raise RecordError("", f"expected a JSON object, got {_kind(obj)}")
    line = cast("dict[str, Any]", obj)
    for name in ("schema", "group", "mask", "reward"):
        if name not in line:
            raise RecordError(name, "is missing; it is required" + _candidate(name, line))
    # The version first: a newer file may be different in everything else.
    _schema("schema", line["schema"])
    if line.get("token_ids") is None and line.get("tokens") is None:
        raise RecordError(
            "token_ids",
            "is missing, and so is 'tokens'; a record needs one of them"
            + (_candidate("token_ids", line) or _candidate("tokens", line)),
        )
    known = {name: line[name] for name in _ORDER if name in line}
    for name in ("rewards", "signals", "credit", "meta"):
        if known.get(name, 0) is None:
            del known[name]
    if (tokens := known.get("tokens")) is not None:
        known["tokens"] = _tokens_from_json("tokens", tokens)
    if (credit := known.get("credit")) is not None:
        known["credit"] = {
            rule: _credit_from_json(f"credit.{rule}", value)
            for rule, value in _mapping("credit", credit).items()
        }
    extra = {name: line[name] for name in line if name not in _ORDER}
    return {**known, "extra": extra}


def _candidate(name: str, line: Iterable[str]) -> str:
    """A hint where an unknown key of the line may be a misspelling of the required `name`."""
    unknown = [key for key in line if key not in _ORDER]
    close = difflib.get_close_matches(name, unknown, n=1)
    return f" (is it the {close[0]!r} of this line? then rename that)" if close else ""


def _tokens_from_json(name: str, values: object) -> list[str | bytes]:
    tokens: list[str | bytes] = []
    for index, value in enumerate(_sequence(name, values)):
        if isinstance(value, list):
            numbers = cast("list[object]", value)
            if not all(type(n) is int and 0 <= n <= 255 for n in numbers):
                raise RecordError(
                    f"{name}[{index}]", "is a list, so it must hold byte values, integers 0 to 255"
                )
            tokens.append(bytes(cast("list[int]", numbers)))
        elif isinstance(value, str):
            tokens.append(value)
        else:
            _refuse(f"{name}[{index}]", "text or a list of byte values", value)
    return tokens


def _credit_from_json(name: str, value: object) -> CreditRecord:
    entry: Mapping[str, Any] = _mapping(name, value)
    for key in entry:
        if key not in _CREDIT_KEYS:
            raise RecordError(
                f"{name}.{key}",
                f"is not known; credit holds {', '.join(_CREDIT_KEYS)}{nearest(key, _CREDIT_KEYS)}",
            )
    try:
        return CreditRecord(**entry)
    except RecordError as error:
        raise RecordError(f"{name}.{error.field}", error.problem) from None


# --- one check a field: each takes the field's name and value, and gives the value to keep ---


def _set(target: object, name: str, value: object) -> None:
    object.__setattr__(target, name, value)


def _kind(value: object) -> str:
    """What a value is, for messages: itself if it is simple, else its type."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    shown = repr(value)
    shown = shown if len(shown) <= 40 else shown[:40] + "..."
    return shown if isinstance(value, (int, float, str)) else f"{type(value).__name__} {shown}"


def _refuse(name: str, expected: str, value: object) -> NoReturn:
    raise RecordError(name, f"expected {expected}, got {_kind(value)}")


def _sequence(name: str, value: object, expected: str = "a list") -> Sequence[object]:
    if not isinstance(value, (list, tuple)):
        _refuse(name, expected, value)
    return cast("Sequence[object]", value)


def _mapping(name: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        _refuse(name, "an object", value)
    entries = cast("Mapping[object, object]", value)
    for key in entries:
        if not isinstance(key, str):
            _refuse(name, "text for each key", key)
    return {_text(name, key): entry for key, entry in entries.items()}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        _refuse(name, "text", value)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        # JSON reads an escaped pair of surrogates as one character, so a pair is one here too.
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return str(value)


def _integer(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        _refuse(name, "an integer", value)
    if value.bit_length() > _LARGEST_INT_BITS:
        raise RecordError(name, f"is an integer of more than {_LARGEST_INT_BITS} bits")
    return int(value)


def _schema(name: str, value: object) -> int:
    version = _integer(name, value)
    if version > SCHEMA:
        raise RecordError(
            name,
            f"is {version}, written by a newer version of tokencredit (this one reads {SCHEMA}); "
            "upgrade tokencredit",
        )
    if version != SCHEMA:
        raise RecordError(name, f"is {version}, which never existed; expected {SCHEMA}")
    return version


def _step(name: str, value: object) -> int | None:
    if value is None:
        return None
    step = _integer(name, value)
    if step < 0:
        raise RecordError(name, f"is {step}; a step is 0 or more")
    return step


def _label(name: str, value: object) -> str | int:
    if isinstance(value, str):
        return _text(name, value)
    if not _is_int(value):
        _refuse(name, "text or an integer", value)
    return _integer(name, value)


def _flag(name: str, value: object) -> bool | None:
    if value is not None and not isinstance(value, bool):
        _refuse(name, "true, false or null", value)
    return value


def _number(name: str, value: object) -> float | None:
    """A finite number, or None; NaN, which tensors use for unknown, is None."""
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        _refuse(name, "a number or null", value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise RecordError(name, "is infinite; numbers must be finite, null = unknown")
    return None if math.isnan(number) else number


def _numbers(name: str, values: object) -> tuple[float | None, ...]:
    items = _sequence(name, values)
    # The usual case at C speed: a response has thousands of these.
    if set(map(type, items)) <= {float} and all(map(math.isfinite, cast("list[float]", items))):
        return tuple(cast("list[float]", items))
    try:
        return tuple([_number(name, item) for item in items])
    except RecordError:
        for index, item in enumerate(items):
            _number(f"{name}[{index}]", item)
        raise


def _token_ids(name: str, values: object) -> tuple[int, ...] | None:
    if values is None:
        return None
    items = _sequence(name, values)
    if set(map(type, items)) <= {int}:
        ids = cast("Sequence[int]", items)
        if not ids or (min(ids) >= 0 and max(ids) <= _LARGEST_TOKEN_ID):
            return tuple(ids)
    for index, item in enumerate(items):
        if not isinstance(item, int) or isinstance(item, bool):
            _refuse(f"{name}[{index}]", "a token id, an integer", item)
        if not 0 <= item <= _LARGEST_TOKEN_ID:
            raise RecordError(
                f"{name}[{index}]", f"is {_kind(item)}; a token id is 0 or more and below 2**63"
            )
    return tuple([int(cast("int", item)) for item in items])


def _mask(name: str, values: object) -> tuple[int, ...]:
    items = _sequence(name, values)
    if not set(map(type, items)) <= {int} or not set(items) <= {0, 1}:
        for index, item in enumerate(items):
            if not _is_int(item) or item not in (0, 1):
                _refuse(f"{name}[{index}]", "0 or 1", item)
    return tuple([int(cast("int", item)) for item in items])


def _tokens(name: str, values: object) -> tuple[str | bytes, ...] | None:
    if values is None:
        return None
    return tuple(
        [
            item if isinstance(item, bytes) else _text(f"{name}[{index}]", item)
            for index, item in enumerate(_sequence(name, values))
        ]
    )


def _prompt(name: str, value: object) -> str | tuple[_Message, ...] | None:
    if value is None:
        return None
    if isinstance(value, str):
        return _text(name, value)
    messages: list[_Message] = []
    for index, item in enumerate(_sequence(name, value, "text or a list of messages")):
        message = _json_object(f"{name}[{index}]", item)
        if not isinstance(message.get("role"), str):
            raise RecordError(f"{name}[{index}].role", "expected the role of the message, as text")
        messages.append(message)
    return tuple(messages)


def _rewards(name: str, value: object) -> dict[str, float | None]:
    return {key: _number(f"{name}.{key}", entry) for key, entry in _mapping(name, value).items()}


def _signals(name: str, value: object) -> dict[str, tuple[float | None, ...]]:
    return {key: _numbers(f"{name}.{key}", entry) for key, entry in _mapping(name, value).items()}


def _credit(name: str, value: object) -> dict[str, CreditRecord]:
    kept: dict[str, CreditRecord] = {}
    for key, entry in _mapping(name, value).items():
        if not isinstance(entry, CreditRecord):
            _refuse(f"{name}.{key}", "a CreditRecord", entry)
        kept[key] = entry
    return kept


def _json_object(name: str, value: object) -> dict[str, Any]:
    return {key: _json_value(f"{name}.{key}", v, 0) for key, v in _mapping(name, value).items()}


def _json_value(name: str, value: object, depth: int) -> Any:
    """A copy of anything JSON can hold: tuples become lists, as they would after reading."""
    if depth > _DEEPEST:
        raise RecordError(name[:80] + "...", f"is nested deeper than {_DEEPEST} levels")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(name, value)
    if _is_int(value):
        return _integer(name, value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RecordError(name, f"is {value}, which JSON cannot hold; use null")
        return float(value)
    if isinstance(value, (list, tuple)):
        items = cast("Sequence[object]", value)
        return [_json_value(f"{name}[{index}]", v, depth + 1) for index, v in enumerate(items)]
    if isinstance(value, Mapping):
        entries = _mapping(name, cast("object", value))
        return {key: _json_value(f"{name}.{key}", v, depth + 1) for key, v in entries.items()}
    _refuse(name, "something JSON can hold", value)


def _optional(check: Callable[[str, object], object]) -> Callable[[str, object], object]:
    return lambda name, value: None if value is None else check(name, value)


_CHECKS: dict[str, Callable[[str, object], object]] = {
    "schema": _schema,
    "group": _label,
    "step": _step,
    "prompt_id": _optional(_label),
    "prompt": _prompt,
    "prompt_token_ids": _token_ids,
    "response": _optional(_text),
    "token_ids": _token_ids,
    "tokens": _tokens,
    "mask": _mask,
    "reward": _number,
    "rewards": _rewards,
    "success": _flag,
    "keep": _flag,
    "truncated": _flag,
    "signals": _signals,
    "credit": _credit,
    "meta": _json_object,
    "extra": _json_object,
}
_ORDER = tuple(name for name in _CHECKS if name != "extra")
_CREDIT_KEYS = tuple(entry.name for entry in dataclasses.fields(CreditRecord))
