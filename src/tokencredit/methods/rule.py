"""What every credit rule is: options, a pure function, its needs, its paper's recipe."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, cast, get_args, get_origin, get_type_hints

from tokencredit.errors import InputError, nearest
from tokencredit.losses import Surrogate

if TYPE_CHECKING:
    from tokencredit.credit import Credit
    from tokencredit.rollouts import Rollouts

__all__ = ["Option", "Recipe", "Rule", "option"]


@dataclass(frozen=True)
class Recipe:
    """What a paper trains with around its rule.

    A trainer applies ``required`` always (a configuration that contradicts it is refused) and the
    rest where the user's configuration is silent.

    Attributes:
        surrogate: ratio level, clip range and aggregation of the policy loss.
        ratio_required: the rule means something else under another ratio level.
        mask_truncated: truncated responses count in the statistics but not in the loss.
        filter_uniform: groups without a mix of successes and failures leave the loss.
        kl: coefficient of the KL penalty to a reference policy.
        source: where the paper says so.
    """

    surrogate: Surrogate
    ratio_required: bool = True
    mask_truncated: bool = False
    filter_uniform: bool = False
    kl: float = 0.0
    source: str = ""


@dataclass(frozen=True)
class Option:
    """One option of a rule, as ``tokencredit methods NAME`` prints it."""

    name: str
    kind: str
    default: Any
    help: str
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    choices: tuple[Any, ...] | None = None

    @property
    def range(self) -> str:
        """The allowed values in words, for example ``> 0`` or ``joint | zero_filled``."""
        if self.choices is not None:
            return " | ".join(str(c) for c in self.choices)
        if self.kind == "range":
            return "low,high or none"
        if self.kind == "names":
            return "names or none"
        parts: list[str] = []
        if self.low is not None:
            parts.append(f"{'>' if self.low_open else '>='} {self.low:g}")
        if self.high is not None:
            parts.append(f"<= {self.high:g}")
        return ", ".join(parts) or "any"


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    low_open: bool = False,
    choices: tuple[Any, ...] | None = None,
) -> Any:
    """A dataclass field of a rule that carries its help text and its allowed values."""
    metadata = {"help": help, "low": low, "high": high, "low_open": low_open, "choices": choices}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Rule(ABC):
    """A credit rule: a frozen set of options that turns `Rollouts` into `Credit`.

    Subclass it as a frozen dataclass whose fields are made by `option`, set the class variables,
    and write `credit` as a pure function. `tokencredit.register` gives it a name.
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    acts_on: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()
    """Names of the signals that the rule cannot do without. Where options decide, a subclass makes
    it a property (DATC): ask an object, not the class."""
    reads: ClassVar[tuple[str, ...]] = ()
    """Names of signals that the rule, or its diagnostics, read where they are there and do without
    elsewhere. An engine forms those that it can without much ado."""
    control_of: ClassVar[str] = ""
    """The method that this rule is an ablation of, if it is one."""
    reads_success: ClassVar[bool] = False
    """Whether the rule reads ``Rollouts.success``: engines then ask which reward decides it."""

    def __post_init__(self) -> None:
        """Check every option against its declared type, range and choices."""
        cls = type(self)
        if any(isinstance(v, Field) for c in cls.__mro__ for v in vars(c).values()):
            raise InputError(f"{cls.__name__}: a rule with options is a @dataclass(frozen=True)")
        for spec in self.option_list():
            value = _coerce(getattr(self, spec.name), spec, self.name)
            object.__setattr__(self, spec.name, value)
        for name in ("needs", "reads"):  # which options may decide
            value = getattr(self, name)
            if isinstance(value, str):
                raise InputError(f"{cls.__name__}: {name} must be a tuple of names, got {value!r}")
        self.check()

    def check(self) -> None:  # noqa: B027 - a hook that most rules leave empty
        """Check relations between options; raise `InputError` where they do not fit."""

    @abstractmethod
    def credit(self, rollouts: Rollouts) -> Credit:
        """Assign credit. Use `tokencredit.assign`, which checks the needed signals first."""

    @property
    def recipe(self) -> Recipe:
        """What the paper trains with around this rule; by default a token-level ratio."""
        return Recipe(Surrogate())

    @property
    def whole_batch(self) -> bool:
        """Whether some statistic runs over the whole batch rather than one prompt's group."""
        return any(
            getattr(self, name, "group") == "batch"
            for name in ("normalise_over", "share_over", "scale")
        )

    def options(self) -> dict[str, Any]:
        """The options as a plain mapping: what a YAML file or a record holds.

        Example:
            >>> from tokencredit import GRPO
            >>> GRPO().options()
            {'scale': 'group', 'correction': 1, 'eps': 0.0}
        """
        return {spec.name: getattr(self, spec.name) for spec in self.option_list()}

    @classmethod
    def option_list(cls) -> tuple[Option, ...]:
        """Every option with its type, default, help and allowed values."""
        hints = get_type_hints(cls)
        specs: list[Option] = []
        for f in fields(cls):
            if "help" not in f.metadata:
                continue
            assert f.default is not MISSING
            specs.append(Option(f.name, _kind(hints[f.name]), f.default, **dict(f.metadata)))
        return tuple(specs)

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Rule:
        """Make the rule from a mapping, refusing unknown names with the nearest known one.

        Example:
            >>> from tokencredit import GTPO
            >>> GTPO.from_options({"alpha2": "0.2"}).alpha2
            0.2
        """
        known = [spec.name for spec in cls.option_list()]
        for name in options:
            if name not in known:
                listed = ", ".join(known) or "none"
                raise InputError(
                    f"{cls.name}: unknown option {name!r}{nearest(str(name), known)}; "
                    f"options: {listed}"
                )
        return cls(**options)


def _kind(hint: Any) -> str:
    if hint in (int, float, bool, str):
        return hint.__name__
    if get_origin(hint) is tuple:
        return "names"
    members = {getattr(a, "__name__", str(a)) for a in get_args(hint)}
    return "range" if "tuple" in members else "|".join(sorted(members))


def _coerce(value: Any, spec: Option, rule: str) -> Any:
    """Bring a value from Python, YAML or a command line to the option's type and check it."""

    def refuse(expected: str) -> InputError:
        return InputError(f"{rule}: option {spec.name} must be {expected}, got {value!r}")

    if spec.choices is not None:
        if value in spec.choices:
            return value
        hint = nearest(str(value), [str(c) for c in spec.choices])
        raise refuse(f"one of {', '.join(map(str, spec.choices))}{hint}")
    if spec.kind == "range":
        return _coerce_range(value, refuse)
    if spec.kind == "names":
        return _coerce_names(value, refuse)
    if spec.kind == "bool":
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if not isinstance(value, bool):
            raise refuse("true or false")
        return value
    if spec.kind == "str":
        if not isinstance(value, str):
            raise refuse("a name")
        return value
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise refuse("a number") from None
    if not math.isfinite(number):
        raise refuse("a finite number")
    if spec.kind == "int":
        if number != int(number):
            raise refuse("a whole number")
        number = int(number)
    too_low = spec.low is not None and (number <= spec.low if spec.low_open else number < spec.low)
    if too_low or (spec.high is not None and number > spec.high):
        raise refuse(spec.range)
    return number


def _coerce_names(value: Any, refuse: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = value.strip("[]() ")
    if value is None or (isinstance(value, str) and value.lower() in ("none", "null", "")):
        return ()
    parts: Any = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise refuse("names separated by commas, or none")
    names = list(cast("list[Any]", parts))
    if not all(isinstance(name, str) and name.strip(" '\"") for name in names):
        raise refuse("names separated by commas, or none")
    return tuple(str(name).strip(" '\"") for name in names)


def _coerce_range(value: Any, refuse: Any) -> tuple[float, float] | None:
    if value is None or (isinstance(value, str) and value.lower() in ("none", "null", "")):
        return None
    parts: Any = value.strip("[]() ").split(",") if isinstance(value, str) else value
    try:
        low, high = (float(part) for part in parts)
    except (TypeError, ValueError):
        raise refuse("two numbers low,high or none") from None
    if not (math.isfinite(low) and math.isfinite(high) and 0 <= low <= high and high > 0):
        raise refuse("two finite numbers with 0 <= low <= high")
    return (low, high)
