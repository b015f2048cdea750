"""Names, flags and options on the pages of slime and SkyRL are those of the code."""

from __future__ import annotations

import re
from typing import get_args

import pytest
import yaml
from documents import DOCS, ROOT, shipped

from tokencredit.engines import slime
from tokencredit.engines.options import PREFIX, loss_mode, methods_fed_by, rule_of
from tokencredit.engines.skyrl.settings import estimator_names
from tokencredit.losses import RatioLevel

PAGES = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("slime", "skyrl")}
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_slimes_paths_exist() -> None:
    named = set(re.findall(r"tokencredit\.engines\.slime\.(\w+)", PAGES["slime"] + README))
    assert {"gtpo", "keep_loss"} <= named
    for name in named - {"METHOD"}:
        assert callable(getattr(slime, name)), name


def test_slimes_error_and_its_page_name_the_same_flags() -> None:
    for word in slime.FORCE_THE_PASS.split():
        assert word in PAGES["slime"], word


def test_slimes_options_exist() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGES["slime"], re.DOTALL)
    content = yaml.safe_load(text)
    assert set(content) == {slime.SECTION}
    rule_of("gtpo", content[slime.SECTION], slime.SECTION)


def test_skyrls_names_exist() -> None:
    text = PAGES["skyrl"] + README
    for name in re.findall(r"advantage_estimator=(tokencredit_\w+)", text):
        assert name == f"{PREFIX}NAME" or name in estimator_names(), name
    losses = {loss_mode(level) for level in get_args(RatioLevel)}
    assert losses == set(re.findall(r"tokencredit_(?:token|sequence_\w+|gspo_token)\b", text))
    for option in re.findall(r"algorithm\.tokencredit\.([a-z]\w+)=(\S+?)`", text):
        rule_of("gtpo", dict([option]), "page")


@pytest.mark.parametrize("page", ["slime", "skyrl", "verl"])
def test_the_methods_that_an_engine_can_feed_are_named(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8").split("\n## ")[0]
    for method in set(methods_fed_by(["entropy"])) & set(shipped()):
        assert f"`{method}`" in text, (page, method)
