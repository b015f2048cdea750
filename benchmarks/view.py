"""`tokencredit view` against the plain way: a page with one element for every token.

Both pages are made of the same file and opened in the same Chromium. The plain one colours each
token by one number and holds nothing else, which is less than ours holds; it is what attribution
libraries write, and it is left out where a browser can no longer bear it.
"""

from __future__ import annotations

import html
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tokencredit.records import CreditRecord, Record, RecordWriter, read_records
from tokencredit.viewer import save_page

from .harness import Report, Table, clock, progress

__all__ = ["run"]

SIZES = ((64, 200), (512, 1000), (5000, 1000))
QUICK_SIZES = ((16, 20),)
MOST_PLAIN = 1_000_000
"""Tokens; beyond, the plain page is not tried."""
GROUP = 8
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SCROLL = """([selector, step, ms]) => new Promise((done) => {
  const element = document.querySelector(selector);
  const gaps = [];
  let last = performance.now();
  const end = last + ms;
  const frame = (now) => {
    gaps.push(now - last);
    last = now;
    element.scrollTop += step;
    if (now < end) return requestAnimationFrame(frame);
    gaps.sort((a, b) => a - b);
    done([gaps[gaps.length >> 1], gaps[gaps.length - 1]]);
  };
  requestAnimationFrame(frame);
})"""


def responses(count: int, length: int) -> Iterator[Record]:
    """Random tokens with entropy, log-probability, shaped reward and advantage."""
    seed = torch.Generator().manual_seed(0)
    words = [f" word{k}" for k in range(3000)] + [" the", ",", ".", "\n"]

    def numbers() -> list[float]:
        return [round(x, 5) for x in torch.randn(length, generator=seed).tolist()]

    for k in range(count):
        ids: list[int] = torch.randint(len(words), (length,), generator=seed).tolist()
        credit = CreditRecord(base=1.0, reward=numbers(), advantage=numbers())
        yield Record(
            group=k // GROUP,
            prompt="A question?",
            token_ids=ids,
            tokens=[words[i] for i in ids],
            mask=[1] * length,
            reward=float(k % 3 == 0),
            success=k % 3 == 0,
            signals={
                "entropy": [abs(x) for x in numbers()],
                "logprob": [-abs(x) for x in numbers()],
            },
            credit={"gtpo": credit},
        )


def plain_page(source: Path, target: Path) -> None:
    """Every token an element, as a page that is written in an afternoon has it."""
    with target.open("w", encoding="utf-8") as file:
        file.write("<!DOCTYPE html><meta charset='utf-8'><body>")
        for record in read_records(source):
            file.write(f"<h3>{record.group}: {record.reward}</h3><div>")
            values = record.credit["gtpo"].advantage or ()
            for token, value in zip(record.tokens or (), values, strict=True):
                hue = "0,114,178" if (value or 0) > 0 else "213,94,0"
                share = min(abs(value or 0) / 2, 1)
                file.write(
                    f'<span title="{value}" style="background:rgba({hue},{share:.2f})">'
                    f"{html.escape(str(token))}</span>"
                )
            file.write("</div>")


MEASURED = """
import sys
from pathlib import Path
from tokencredit.viewer import save_page

def most():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

before = most()
save_page(sys.argv[1], Path(sys.argv[2]), overwrite=True)
print(most() - before)
"""


def memory(source: Path, target: Path) -> float:
    """Bytes of memory that making the page takes beyond the imports, in a process of its own."""
    command = [sys.executable, "-c", MEASURED, str(source), str(target)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return 1024 * float(done.stdout)


def opened(browser: Any, path: Path, first: str, scroller: str, ms: int) -> list[float]:
    """Seconds until the first tokens are drawn, then the middle and the worst frame, in ms."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.set_default_timeout(300_000)
    start = time.perf_counter()  # another process draws, so the CPU's clock would not do
    page.goto(path.as_uri())
    page.wait_for_selector(first)
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    seconds = time.perf_counter() - start
    middle, worst = page.evaluate(SCROLL, [scroller, 300, ms])
    page.close()
    return [seconds, middle, worst]


def run(*, quick: bool) -> Report:
    """Make and open pages of several sizes."""
    making = Table(
        "Making the page",
        ("responses x tokens", "records, MB", "page, MB", "seconds", "of which reading the records",
         "microseconds a token", "peak memory, MB"),
    )  # fmt: skip
    opening = Table(
        "Opening it in Chromium",
        ("responses x tokens", "first tokens, s", "plain page, s", "plain / ours",
         "middle frame, ms", "worst frame, ms", "plain, worst frame, ms"),
    )  # fmt: skip
    opening.notes.append(
        "Frames while the list of responses (plain: the page) is scrolled as fast as it draws; at "
        "60 a second a frame takes 16.7 ms. `-`: not tried."
    )
    program = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for count, length in QUICK_SIZES if quick else SIZES:
            progress(f"view: {count} x {length}")
            source, ours, plain = (folder / n for n in ("r.jsonl", "ours.html", "plain.html"))
            with RecordWriter(source, overwrite=True) as writer:
                for record in responses(count, length):
                    writer.write(record)
            start = clock()
            for _ in read_records(source):
                pass
            reading = clock() - start
            start = clock()
            summary = save_page(source, ours, overwrite=True)
            seconds = clock() - start
            peak = memory(source, ours)
            size = f"{count} x {length}"
            making.rows.append(
                [size, source.stat().st_size / 1e6, summary.size / 1e6, seconds, reading,
                 1e6 * seconds / summary.tokens, peak / 1e6]
            )  # fmt: skip
            if program is None:
                continue
            from playwright.sync_api import sync_playwright

            try_plain = count * length <= MOST_PLAIN
            if try_plain:
                plain_page(source, plain)
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
                ms = 200 if quick else 3000
                mine = opened(browser, ours, ".tokens .t", ".rows", ms)
                theirs = opened(browser, plain, "span", "html", ms) if try_plain else None
                browser.close()
            row: list[str | float] = [size, mine[0], "-", "-", mine[1], mine[2], "-"]
            if theirs is not None:
                row[2], row[3], row[6] = theirs[0], theirs[0] / mine[0], theirs[2]
            opening.rows.append(row)
    return Report("view", [making, opening] if opening.rows else [making])
