"""Takes view.png: the page of `tokencredit view`, on the rollouts of a DATC run from the tests.

python docs/images/view.py [PICTURE]   (needs the extra dev, and Chromium)
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import tokencredit

HERE = Path(__file__).parent
RUN = HERE.parents[1] / "tests" / "compare" / "datc_run.jsonl.gz"

picture = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "view.png"
chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
    page = tokencredit.view(RUN, credit="grpo", by="datc.weight", title="chain-qwen3-datc-001")
    file = page.save(Path(folder) / "view.html")
    browser = playwright.chromium.launch(
        executable_path=chromium, args=["--no-sandbox", "--disable-gpu", "--disable-quic"]
    )
    window = browser.new_page(viewport={"width": 1280, "height": 620}, device_scale_factor=1.5)
    window.goto(file.as_uri())
    window.get_by_label("columns", exact=True).select_option("narrow")
    window.locator("#row-4").click()
    window.locator("#t-4-a-5").click()
    window.screenshot(path=picture)
    browser.close()
