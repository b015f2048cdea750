"""`python -m tokencredit.engines.verl check`: one screen, exit code 0 or 2, no tracebacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokencredit.engines.verl import checking
from tokencredit.engines.verl.checking import main

needs_verl = pytest.mark.skipif(
    checking.find_spec("verl") is None,
    reason="verl is not installed: `make verl` makes its environment",
)
FINE = ["algorithm.adv_estimator=tokencredit_gtpo", "actor_rollout_ref.rollout.n=8"]


def test_verl_missing_is_said(monkeypatch, capsys):
    monkeypatch.setattr(checking, "find_spec", lambda name: None)
    assert main(["check"]) == 2
    assert "verl is not installed" in capsys.readouterr().out
    assert main(["check", *FINE]) == 2


@pytest.mark.parametrize("argv", [[], ["chekc"], ["check", "--flag"]])
def test_a_wrong_command_is_one_line(argv, capsys):
    assert main(argv) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_help(capsys):
    assert main(["--help"]) == 0
    assert "CONFIG.yaml" in capsys.readouterr().out


@needs_verl
def test_the_installation(capsys):
    assert main(["check"]) == 0
    out = capsys.readouterr().out
    assert "loaded by verl" in out and "NOT" not in out
    assert "tokencredit_gtpo" in out and "tokencredit_sequence_arithmetic" in out
    assert out.count("attached") == 2
    assert "loss_mode=tokencredit_sequence_arithmetic" in out  # what grpo_s needs
    assert len(out.splitlines()) <= 24


@needs_verl
def test_a_fine_configuration(capsys):
    words = [*FINE, "+algorithm.tokencredit.alpha2=0.2", "+algorithm.tokencredit.success_from=acc"]
    assert main(["check", *words]) == 0
    out = capsys.readouterr().out
    assert "alpha2=0.2" in out and "the reward's field acc" in out and "fine" in out


@needs_verl
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algorithm.adv_estimator=gtop"], "did you mean 'gtpo'"),
        (["algorithm.adv_estimator=tokencredit_datc"], "reward model's gradient"),
        (["algorithm.adv_estimator=grpo"], "not one of tokencredit's"),
        ([*FINE, "algorithm.rollout_correction.bypass_mode=True"], "bypass_mode=False"),
        ([*FINE, "actor_rollout_ref.rollout.n=1"], "rollout.n=1"),
        ([*FINE, "+algorithm.tokencredit.alpa2=1"], "did you mean 'alpha2'"),
        (["algorithm.adv_estimator=tokencredit_gtop"], "did you mean 'gtpo'"),
        ([*FINE, "actor_rollout_ref.actor.policy_loss.loss_mode=vanila"], "did you mean 'vanilla'"),
        ([*FINE, "actor_rollout_ref.rollout.n=abc"], "must be a whole number"),
        ([*FINE, "algorithm.adv_estimator=grpo_s"], "loss_mode=tokencredit_sequence_arithmetic"),
    ],
)
def test_what_is_in_the_way_is_named(words, message, capsys):
    assert main(["check", *words]) == 2
    out = capsys.readouterr().out
    assert "in the way (1):" in out and message in out.split("in the way")[1]


@needs_verl
@pytest.mark.parametrize(
    "words",
    [["nofile.yaml"], ["a.yaml", "b.yaml"], ["algorithm.adv_estimatr=x"], ["x={"],
     [*FINE, "actor_rollout_ref.rollout.n=${nowhere}"]],
)  # fmt: skip
def test_a_users_mistake_is_one_line(words, capsys):
    assert main(["check", *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("tokencredit: check: ")


@needs_verl
def test_a_file_under_overrides(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "defaults: [ppo_trainer, _self_]\n"
        "algorithm: {adv_estimator: grpo_s, tokencredit: {beta2: 0.3}}\n"
        "actor_rollout_ref: {rollout: {n: 4}, actor: {policy_loss: "
        "{loss_mode: tokencredit_sequence_arithmetic}}}\n"
    )
    assert main(["check", str(path)]) == 0
    assert "beta2=0.3" in capsys.readouterr().out
    assert main(["check", str(path), "algorithm.tokencredit.beta2=0.4"]) == 0
    assert "beta2=0.4" in capsys.readouterr().out
    assert main(["check", str(path), "actor_rollout_ref.rollout.n=1"]) == 2
    assert main(["check", str(path), "no.such=1"]) == 2
    path.write_text("just words")
    assert main(["check", str(path)]) == 2


@needs_verl
def test_a_misspelt_section_and_keys_that_verl_does_not_have(tmp_path, capsys):
    assert main(["check", *FINE, "+algorithm.tokencrdit.alpha2=2"]) == 2
    assert "did you mean algorithm.tokencredit?" in capsys.readouterr().out
    path = tmp_path / "mine.yaml"
    path.write_text(
        "actor_rollout_ref: {rolout: {n: 8}}\n"
        "algorithm: {tokencredit: {alpha2: 0.2}}\n"
        "reward: {reward_kwargs: {my_own: 1}}\n"
    )
    main(["check", str(path), *FINE])
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note:")]
    (line,) = [one for one in notes if "rolout" in one]
    assert "actor_rollout_ref.rolout is not among verl's defaults (did you mean 'rollout'" in line
    assert not any("algorithm.tokencredit" in one for one in notes)


@needs_verl
def test_what_differs_from_the_papers_recipe_is_marked(capsys):
    key = "actor_rollout_ref.actor.use_kl_loss"
    main(["check", *FINE, f"{key}=True"])
    assert f"{key}=False   (yours: True)" in capsys.readouterr().out
    main(["check", *FINE, f"{key}=False"])
    out = capsys.readouterr().out
    assert f"{key}=False\n" in out and "clip_ratio_low=0.2\n" in out


@needs_verl
def test_everything_in_the_way_is_said_at_once(capsys):
    words = [*FINE, "+algorithm.tokencredit.alpah2=1", "actor_rollout_ref.rollout.n=1",
             "algorithm.rollout_correction.bypass_mode=True"]  # fmt: skip
    assert main(["check", *words]) == 2
    out = capsys.readouterr().out
    assert "in the way (3)" in out and "did you mean 'alpha2'" in out


@needs_verl
def test_overrides_of_every_kind(tmp_path, capsys):
    assert main(["check", *FINE, "~algorithm.gamma"]) == 0
    path = tmp_path / "mine.yaml"
    path.write_text("algorithm: {tokencredit: {alpha2: 0.3}}\n")
    words = ["check", str(path), *FINE]
    assert main([*words, "~algorithm.gamma", "++algorithm.tokencredit.alpha2=0.4"]) == 0
    assert "alpha2=0.4" in capsys.readouterr().out
    for word, message in (
        ("+algorithm.tokencredit.alpha2=0.4", "is there already"),
        ("actor_rollout_ref.rollout.n=16,8", "one value at a time"),
    ):
        assert main([*words, word]) == 2
        assert message in capsys.readouterr().err


@needs_verl
@pytest.mark.parametrize("words", [[], [*FINE], ["nosuch.key=3"]])
def test_what_is_wrong_with_the_installation_is_said_whatever_the_configuration(words):
    environment = os.environ | {"VERL_USE_EXTERNAL_MODULES": "nosuchmodule"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tokencredit.engines.verl", "check", *words],
        capture_output=True, text=True, env=environment, cwd=Path(__file__).parent, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2 and "nosuchmodule" in done.stdout


@needs_verl
def test_a_plugin_that_verl_does_not_load_is_found_out():
    environment = os.environ | {"VERL_USE_EXTERNAL_PLUGINS": "none"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tokencredit.engines.verl", "check"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parent,
        timeout=300,
    )
    assert done.returncode == 2
    assert "NOT loaded by verl" in done.stdout
    assert "VERL_USE_EXTERNAL_PLUGINS=none keeps verl from loading tokencredit" in done.stdout
