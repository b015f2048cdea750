"""Every public name has its place in the reference."""

from __future__ import annotations

import importlib
import re

import pytest
from documents import DOCS

PACKAGES = (
    "tokencredit",
    "tokencredit.engines.trl",
    "tokencredit.engines.verl",
    "tokencredit.engines.slime",
    "tokencredit.engines.skyrl",
    "tokencredit.records",
    "tokencredit.signals",
    "tokencredit.compare",
    "tokencredit.doctor",
    "tokencredit.lab",
)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_on_a_page(package: str) -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md"))
    shown = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    public = {f"{package}.{name}" for name in importlib.import_module(package).__all__}
    missing = public - shown - {"tokencredit.__version__"}
    assert not missing, missing


def test_every_entry_exists() -> None:
    for path in (DOCS / "api").glob("*.md"):
        for entry in re.findall(r"^::: (\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE):
            module, _, name = entry.rpartition(".")
            assert hasattr(importlib.import_module(module), name), (path.name, entry)
