"""The fixtures of the command line's tests."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_runs import REWARDS, Place, prompts, save_policy


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import json

    folder = tmp_path_factory.mktemp("template")
    save_policy(folder / "policy")
    lines = [json.dumps({"prompt": p}) for p in prompts()]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "rewards_here.py").write_text(REWARDS)
    return folder


@pytest.fixture
def place(
    template: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Iterator[Place]:
    """A copy of the template as the current folder; what `train` changes is put back."""
    folder = tmp_path / "here"
    shutil.copytree(template, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # The same for libraries that read it when they were imported.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    logger = logging.getLogger("tokencredit")
    before = logger.handlers[:], logger.propagate, logger.level
    yield Place(folder, capfd)
    logger.handlers[:], logger.propagate, logger.level = before
    for name in [n for n in sys.modules if n.endswith("_here")]:
        del sys.modules[name]
