"""A real browser to look at pages with; `looking` (this folder) importable by its name."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def _chromium() -> str | None:
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's Chromium, or another by the variable CHROMIUM."""
    program = _chromium()
    if program is None:
        pytest.skip("no Chromium here (install the package chromium, or name it by CHROMIUM)")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        yield running
        running.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens a page from the disk; whatever goes wrong in it, or is fetched, fails the test."""
    said: list[str] = []
    contexts: list[Any] = []

    def open_page(html: str, **options: Any) -> Any:
        path = tmp_path / "page.html"
        path.write_text(html, encoding="utf-8")
        context = browser.new_context(**{"viewport": {"width": 1300, "height": 800}, **options})
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda message: said.append(message.text))
        page.on("dialog", lambda dialog: said.append(f"dialog {dialog.message}"))
        page.on("request", lambda r: r.url == path.as_uri() or said.append(f"fetched {r.url}"))
        page.goto(path.as_uri())
        page.wait_for_selector(".column")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
