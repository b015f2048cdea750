"""What a configuration says, what a rule needs of it, what stands in the way: without verl."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tokencredit import GRPO_S, GTPO, InputError
from tokencredit.engines.verl import (
    Setting,
    needed_overrides,
    notes,
    obstacles,
    recommended_overrides,
    setting_of,
)
from tokencredit.engines.verl.settings import estimator_names, usable_methods

LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"


def config(
    estimator: str = "tokencredit_gtpo", loss: str = "vanilla", n: int = 8, **algorithm: Any
) -> dict[str, Any]:
    return {
        "algorithm": {"adv_estimator": estimator, **algorithm},
        "actor_rollout_ref": {
            "actor": {"policy_loss": {"loss_mode": loss}},
            "rollout": {"n": n},
            "model": {},
        },
    }


def setting(estimator: str = "tokencredit_gtpo", **options: Any) -> Setting:
    found = setting_of({"adv_estimator": estimator, "tokencredit": options})
    assert found is not None
    return found


def test_every_method_that_verl_can_feed_is_there_and_verls_own_names_stay():
    assert set(usable_methods()) >= {"grpo", "dr_grpo", "dapo", "gtpo", "grpo_s"}
    assert not any(name.startswith("datc") for name in usable_methods())
    names = estimator_names()
    assert names["tokencredit_grpo"] == "grpo" and "grpo" not in names
    assert names["gtpo"] == names["tokencredit_gtpo"] == "gtpo"


def test_options_and_success_are_read():
    found = setting(alpha2="0.2", success_from="acc")
    assert found == Setting("tokencredit_gtpo", GTPO(alpha2=0.2), "acc")
    assert found.needs_entropy and found.reads_field == "acc"
    # Rules that do not read success have no use for the field.
    assert setting("tokencredit_grpo", success_from="acc").reads_field is None
    assert setting_of({"adv_estimator": "grpo"}) is None
    assert setting_of({}) is None


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"alpa2": 1}, r"algorithm\.tokencredit\.alpa2: .*did you mean 'alpha2'"),
        ({"alpha2": -1}, r"algorithm\.tokencredit: gtpo: option alpha2 must be >= 0, got -1"),
        ({"alpha2": "much"}, r"option alpha2 must be a number, got 'much'"),
        ({"success_form": "a"}, r"success_form.*did you mean 'success_from'"),
        ({"success_from": 3}, r"algorithm\.tokencredit\.success_from must name a field"),
        ("gtpo", r"algorithm\.tokencredit must hold options"),
    ],
)
def test_bad_options_are_refused_by_their_key(section, message):
    with pytest.raises(InputError, match=message) as refused:
        setting_of({"adv_estimator": "gtpo", "tokencredit": section})
    assert "\n" not in str(refused.value)


def test_what_a_method_needs():
    assert needed_overrides(setting()) == ["algorithm.adv_estimator=tokencredit_gtpo"]
    assert needed_overrides(setting("tokencredit_grpo_s"))[1:] == [
        f"{LOSS}=tokencredit_sequence_arithmetic"
    ]
    geometric = setting("tokencredit_grpo_s", ratio="geometric")
    assert needed_overrides(geometric)[1:] == [f"{LOSS}=tokencredit_sequence_geometric"]
    assert "actor_rollout_ref.actor.clip_ratio_high=0.28" in recommended_overrides(
        setting("tokencredit_dapo")
    )
    assert any("max_response_length" in one for one in recommended_overrides(setting("dr_grpo")))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (config(rollout_correction={"bypass_mode": True}), r"bypass_mode=False$"),
        (config(loss="gspo"), rf"set {re.escape(LOSS)}=vanilla"),
        (config(loss="tokencredit_sequence_arithmetic"), r"each token's own"),
        (config(loss="tokencredit_sequence_arithmetik"), r"did you mean"),
        (config(n=1), r"rollout\.n=1"),
        (config("grpo_s"), rf"set {re.escape(LOSS)}=tokencredit_sequence_arithmetic"),
    ],
)
def test_what_stands_in_the_way_is_named_with_its_cure(given, message):
    found = setting_of(given["algorithm"])
    assert found is not None
    lines = obstacles(given, found)
    assert len(lines) == 1 and re.search(message, lines[0])


@pytest.mark.parametrize(
    "given",
    [
        config(),
        config(loss="tokencredit_token"),
        config("tokencredit_grpo", loss="gspo"),
        config("tokencredit_grpo", rollout_correction={"bypass_mode": True}),
        config("grpo_s", loss="tokencredit_sequence_arithmetic"),
        config("grpo_s", loss="gspo", tokencredit={"ratio": "geometric"}),
    ],
)
def test_nothing_stands_in_the_way(given):
    found = setting_of(given["algorithm"])
    assert found is not None and obstacles(given, found) == []


def test_what_is_only_worth_knowing():
    given = config(use_kl_in_reward=True)
    given["actor_rollout_ref"]["model"]["use_fused_kernels"] = True
    given["actor_rollout_ref"]["rollout"]["agent"] = {"agent_loop_manager_class": "mine.Loops"}
    found = notes(given, setting())
    assert len(found) == 3
    assert "penalty does nothing" in found[0] and "fused" in found[1] and "outputs" in found[2]
    assert notes(config(), setting()) == []
    assert len(notes(config("dapo"), setting("dapo"))) == 2
    assert setting("grpo_s").rule == GRPO_S()


# -- found by trying to break it ---------------------------------------------------------------


def merged(base: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**base, **more}


@pytest.mark.parametrize("place", ["reward", "reward_model"])
@pytest.mark.parametrize("on", [True, "True"])
def test_a_penalty_in_the_score_makes_no_right_response_wrong(place, on):
    penalty = {place: {"reward_kwargs": {"overlong_buffer_cfg": {"enable": on}}}}
    for estimator in ("tokencredit_gtpo", "dapo"):
        found = obstacles(merged(config(estimator), **penalty), setting(estimator))
        assert len(found) == 1 and "set +algorithm.tokencredit.success_from=acc" in found[0]
    named = setting("gtpo", success_from="acc")
    assert obstacles(merged(config("gtpo"), **penalty), named) == []
    assert (
        obstacles(merged(config("tokencredit_grpo"), **penalty), setting("tokencredit_grpo")) == []
    )
    off = {place: {"reward_kwargs": {"overlong_buffer_cfg": {"enable": False}}}}
    assert obstacles(merged(config("gtpo"), **off), setting("gtpo")) == []


@pytest.mark.parametrize("n", ["abc", [8], 8.5, "???", 0, -1])
def test_a_group_size_that_is_none_is_said_and_not_raised(n):
    (line,) = obstacles(config(n=n), setting())
    assert "must be a whole number" in line


def test_one_response_a_prompt_will_do_where_statistics_are_the_batchs():
    batch = {"normalise_over": "batch", "share_over": "batch", "uniform_groups": "literal"}
    assert obstacles(config(n=1), setting(**batch)) == []
    assert "every advantage is 0" in obstacles(config(n=1), setting())[0]


@pytest.mark.parametrize(("value", "on"), [("False", False), ("True", True), (1, True), (0, False)])
def test_a_switch_may_be_a_text(value, on):
    found = obstacles(config(rollout_correction={"bypass_mode": value}), setting())
    assert bool(found) == on


def test_a_policy_loss_that_is_no_mapping():
    wrong = config()
    wrong["actor_rollout_ref"]["actor"]["policy_loss"] = "gspo"
    assert any("holds keys; set " + LOSS in line for line in obstacles(wrong, setting()))


def test_filters_go_by_the_field_that_decides():
    lines = recommended_overrides(setting("dapo", success_from="acc"))
    assert "algorithm.filter_groups.metric=acc" in lines
    assert "algorithm.filter_groups.metric=reward" in recommended_overrides(setting("dapo"))


def test_the_legacy_trainer_drops_no_groups():
    on = config("dapo", filter_groups={"enable": True})
    assert not any("stay in the loss" in line for line in notes(on, setting("dapo")))
    legacy = merged(on, trainer={"use_v1": False})
    assert any(
        "the legacy trainer does not drop" in line for line in notes(legacy, setting("dapo"))
    )


def test_what_has_no_effect_is_noted():
    grpo = setting("tokencredit_grpo", success_from="acc")
    lines = notes(config("tokencredit_grpo", norm_adv_by_std_in_grpo=False), grpo)
    assert any("tokencredit_dr_grpo does not divide" in line for line in lines)
    assert any("grpo does not read success" in line for line in lines)


def test_a_rule_whose_needs_depend_on_options(monkeypatch):
    from tokencredit.methods.registry import methods

    rule = methods()["datc"].rule()
    found = obstacles(config(), Setting("mine", rule))
    assert any("needs work, which verl does not give" in line for line in found)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tokencredit_gtop", "did you mean 'gtpo'"),
        ("tokencredit-gtpo", "set tokencredit_gtpo"),
        ("datc", "DATC needs a reward model's gradient"),
        ("tokencredit_datc_shuffled", "DATC needs"),
        ("grpo", "grpo is somebody else's; set tokencredit_grpo"),
        ("gae", "those are: tokencredit_grpo"),
    ],
)
def test_names_that_are_not_ours(name, words):
    from tokencredit.engines.verl.settings import wrong_name

    assert words in wrong_name(name)


def test_names_with_our_prefix_exist_or_are_refused():
    from tokencredit.engines.verl.settings import misspelt

    names = estimator_names()
    assert misspelt(config(), names) == [] == misspelt(config("grpo"), names)
    (line,) = misspelt(config("tokencredit_gtop"), names)
    assert "did you mean 'gtpo'" in line
    (line,) = misspelt(config("grpo", loss="tokencredit_tokn"), names)
    assert "did you mean 'tokencredit_token'" in line
