"""``tokencredit methods``: what there is, what each needs, and its options."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from tokencredit.cli.main import Parser
from tokencredit.errors import InputError, nearest
from tokencredit.methods.registry import Method, methods

__all__ = ["run"]


def run(argv: list[str]) -> int:
    """List the methods, or explain one."""
    parser = Parser(prog="tokencredit methods", description="List the methods, or explain one.")
    parser.add_argument("name", nargs="?", metavar="NAME")
    options: Any = parser.parse_args(argv)
    known = methods()
    if options.name is None:
        width = max(map(len, known))
        for name, method in known.items():
            if method.rule.control_of:
                continue
            signals = ", ".join(method.needs)
            needs = f"  (reads the signal {signals})" if signals else ""
            print(f"{name:<{width}}  {method.title}  {method.paper}{needs}")
        controls = [name for name, method in known.items() if method.rule.control_of]
        if controls:
            print(f"\ncontrols for ablations: {', '.join(controls)}")
        return 0
    if options.name not in known:
        raise InputError(
            f"methods: unknown method {options.name!r}{nearest(options.name, known)}; "
            f"known: {', '.join(known)}"
        )
    print(_explain(known[options.name]))
    return 0


def _explain(method: Method) -> str:
    surrogate = method.recipe.surrogate
    lines = [
        f"{method.name}: {method.title} ({method.paper})",
        f"acts on    {method.acts_on}",
        f"needs      {', '.join(method.needs) or 'rewards and groups alone'}",
        f"trained    ratio {surrogate.ratio}, clip {surrogate.clip_low:g}/{surrogate.clip_high:g}, "
        f"{surrogate.aggregation}"
        + (", truncated responses out of the loss" if method.recipe.mask_truncated else ""),
        f"           {method.recipe.source}",
        "",
        inspect.cleandoc(method.rule.__doc__ or "").replace("``", ""),
    ]
    if method.options:
        lines += ["", "Options:"]
        rows = [(o.name, f"{o.default}", o.range, o.help) for o in method.options]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        for row in rows:
            cells = "  ".join(f"{row[i]:<{widths[i]}}" for i in range(3))
            lines.append(f"  {cells}  {row[3]}")
    assert {o.name for o in method.options} <= {f.name for f in fields(method.rule)}
    return "\n".join(lines)
