"""The registry: a name for every credit rule, and what each of them is and needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from tokencredit.errors import InputError, nearest
from tokencredit.methods.dapo import DAPO
from tokencredit.methods.datc import (
    DATC,
    DATCFlipped,
    DATCGradTimesInput,
    DATCNormProduct,
    DATCRandom,
    DATCShuffled,
)
from tokencredit.methods.grpo import GRPO, DrGRPO
from tokencredit.methods.grpo_s import GRPO_S
from tokencredit.methods.gtpo import GTPO
from tokencredit.methods.rule import Option, Recipe, Rule

__all__ = ["Method", "methods", "register", "resolve"]

R = TypeVar("R", bound=type[Rule])


@dataclass(frozen=True)
class Method:
    """One entry of the registry.

    Attributes:
        name: what users write.
        title: the method's full name.
        paper: where it was published.
        needs: signals that the rollouts must carry, for the default options.
        acts_on: where in training the method acts.
        options: every option with default, range and help.
        recipe: what the paper trains with, for the default options.
        rule: the class.
    """

    name: str
    title: str
    paper: str
    needs: tuple[str, ...]
    acts_on: str
    options: tuple[Option, ...]
    recipe: Recipe
    rule: type[Rule]


_METHODS: dict[str, Method] = {}


def register(rule: R) -> R:
    """Give a rule class its name; usable as a decorator for rules of your own.

    Raises:
        InputError: the name is empty or taken by another class.

    Example:
        >>> from dataclasses import dataclass
        >>> from tokencredit import Rule, finish, grpo_advantage, methods, register
        >>> @register
        ... @dataclass(frozen=True)
        ... class Half(Rule):
        ...     name = "half"
        ...     title = "Half of GRPO"
        ...     def credit(self, rollouts):
        ...         base = grpo_advantage(rollouts)
        ...         return finish(rollouts, self, advantage=base / 2, base=base)
        >>> "half" in methods()
        True
    """
    name = rule.name
    taken = _METHODS.get(name)
    # The same class again is welcome: a notebook runs its cells twice.
    if not name or (taken is not None and _full_name(taken.rule) != _full_name(rule)):
        raise InputError(f"register: {rule.__name__} needs a name of its own, got {name!r}")
    _METHODS[name] = Method(
        name=name,
        title=rule.title,
        paper=rule.paper,
        needs=rule().needs,
        acts_on=rule.acts_on,
        options=rule.option_list(),
        recipe=_recipe(rule),
        rule=rule,
    )
    return rule


def _full_name(rule: type[Rule]) -> tuple[str, str]:
    return rule.__module__, rule.__qualname__


def _recipe(rule: type[Rule]) -> Recipe:
    return rule().recipe


def methods() -> Mapping[str, Method]:
    """Every registered method by name.

    Example:
        >>> from tokencredit import methods
        >>> methods()["gtpo"].needs
        ('entropy',)
    """
    return MappingProxyType(_METHODS)


def resolve(rule: str | Rule, options: Mapping[str, Any] | None = None) -> Rule:
    """The rule object for a name and options, or the object itself.

    Raises:
        InputError: an unknown name or option (with the nearest known one), an option out of
            range, or options beside a rule object.

    Example:
        >>> resolve("gtpo", {"alpha2": 0.2}).alpha2
        0.2
    """
    if isinstance(rule, Rule):
        if options:
            raise InputError(
                f"{rule.name}: options go into the rule object, not beside it: {', '.join(options)}"
            )
        return rule
    if not isinstance(rule, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(
            f"a rule must be a method's name or a rule object such as GTPO(), got {rule!r}"
        )
    if rule not in _METHODS:
        hint = nearest(rule, _METHODS)
        raise InputError(f"unknown method {rule!r}{hint}; known: {', '.join(_METHODS)}")
    return _METHODS[rule].rule.from_options(dict(options or {}))


for _rule in (GRPO, DrGRPO, DAPO, GTPO, GRPO_S, DATC):
    register(_rule)
for _rule in (DATCFlipped, DATCRandom, DATCNormProduct, DATCGradTimesInput, DATCShuffled):
    register(_rule)
