"""Options of the rules: coercion from YAML and command lines, and the message of each refusal."""

import math
from typing import Any

import pytest
import torch

from tokencredit import (
    DAPO,
    DATC,
    GRPO,
    GRPO_S,
    GTPO,
    InputError,
    MissingExtraError,
    MissingSignalError,
    Rollouts,
    Rule,
    assign,
    methods,
    resolve,
)
from tokencredit.errors import nearest
from tokencredit.methods import DATCRandom

PLAIN = Rollouts([1.0, 0.0], ["p", "p"], [[1], [1]])


@pytest.mark.parametrize(
    ("name", "options", "want"),
    [
        ("gtpo", {"entropy_floor": "1e-6"}, {"entropy_floor": 1e-6}),
        ("gtpo", {"alpha1": 1, "alpha2": "0.2"}, {"alpha1": 1.0, "alpha2": 0.2}),
        ("gtpo", {"entropy_range": "0.2,0.28"}, {"entropy_range": (0.2, 0.28)}),
        ("gtpo", {"entropy_range": "[0.2, 0.28]"}, {"entropy_range": (0.2, 0.28)}),
        ("gtpo", {"entropy_range": "(0.2, 0.28)"}, {"entropy_range": (0.2, 0.28)}),
        ("gtpo", {"entropy_range": [0, 1]}, {"entropy_range": (0.0, 1.0)}),
        ("gtpo", {"entropy_range": ["0.2", "2e-1"]}, {"entropy_range": (0.2, 0.2)}),
        ("gtpo", {"entropy_range": "none"}, {"entropy_range": None}),
        ("gtpo", {"entropy_range": "null"}, {"entropy_range": None}),
        ("gtpo", {"entropy_range": "None"}, {"entropy_range": None}),
        ("gtpo", {"entropy_range": None}, {"entropy_range": None}),
        ("gtpo", {"correction": "0"}, {"correction": 0}),
        ("gtpo", {"correction": 1.0}, {"correction": 1}),
        ("gtpo", {"normalise": "own_set"}, {"normalise": "own_set"}),
        ("grpo_s", {"beta2": "1e-1"}, {"beta2": 0.1}),
        ("grpo_s", {"ratio": "geometric"}, {"ratio": "geometric"}),
        ("grpo", {"scale": "none"}, {"scale": "none"}),  # a choice, not the absence of one
        ("datc", {"freeze": "eos,structural"}, {"freeze": ("eos", "structural")}),
        ("datc", {"freeze": "[eos, structural]"}, {"freeze": ("eos", "structural")}),
        ("datc", {"freeze": "['eos', \"structural\"]"}, {"freeze": ("eos", "structural")}),
        ("datc", {"freeze": ["eos", "template"]}, {"freeze": ("eos", "template")}),
        ("datc", {"freeze": ("eos",)}, {"freeze": ("eos",)}),
        ("datc", {"freeze": " eos "}, {"freeze": ("eos",)}),
        ("datc", {"freeze": "none"}, {"freeze": ()}),
        ("datc", {"freeze": "[]"}, {"freeze": ()}),
        ("datc", {"freeze": []}, {"freeze": ()}),
        ("datc", {"freeze": None}, {"freeze": ()}),
        ("datc", {"bound": "2"}, {"bound": 2.0}),
        ("datc", {"alignment": "natural"}, {"alignment": "natural"}),
        ("datc_shuffled", {"seed": "7", "freeze": "eos"}, {"seed": 7, "freeze": ("eos",)}),
        ("dapo", {"filter_uniform": "false"}, {"filter_uniform": False}),
        ("dapo", {"filter_uniform": "True"}, {"filter_uniform": True}),
        ("dapo", {"filter_uniform": False}, {"filter_uniform": False}),
    ],
)
def test_coercion(name: str, options: dict[str, Any], want: dict[str, Any]) -> None:
    rule = resolve(name, options)
    for key, value in want.items():
        got = rule.options()[key]
        assert got == value and type(got) is type(value)
    # What `options` gives makes the same rule again, from the name or the class.
    assert resolve(name, rule.options()) == rule


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("gtpo", {"alpha_2": 0.1}, ["gtpo", "'alpha_2'", "did you mean 'alpha2'?", "alpha1"]),
        ("gtpo", {"Alpha2": 0.1}, ["gtpo", "'Alpha2'", "did you mean 'alpha2'?"]),
        ("gtpo", {"normalize": "joint"}, ["gtpo", "'normalize'", "did you mean 'normalise'?"]),
        ("gtpo", {"temperature": 1}, ["gtpo", "unknown option 'temperature'; options: alpha1"]),
        ("dr_grpo", {"eps": 1}, ["dr_grpo", "unknown option 'eps'", "options: none"]),
        ("gtpo", {"alpha2": -0.1}, ["gtpo", "alpha2", ">= 0", "-0.1"]),
        ("gtpo", {"alpha2": "many"}, ["gtpo", "alpha2", "a number", "'many'"]),
        ("gtpo", {"alpha2": None}, ["gtpo", "alpha2", "a number", "None"]),
        ("gtpo", {"alpha2": True}, ["gtpo", "alpha2", "a number", "True"]),
        ("gtpo", {"alpha2": math.nan}, ["gtpo", "alpha2", "a finite number", "nan"]),
        ("gtpo", {"alpha2": "inf"}, ["gtpo", "alpha2", "a finite number"]),
        ("gtpo", {"alpha2": 10**400}, ["gtpo", "alpha2", "a number"]),
        ("gtpo", {"alpha2": [0.1]}, ["gtpo", "alpha2", "a number", "[0.1]"]),
        ("gtpo", {"alpha1": 0, "alpha2": 0}, ["gtpo", "alpha1 and alpha2 cannot both be 0"]),
        ("gtpo", {"entropy_floor": 0}, ["gtpo", "entropy_floor", ">= 1e-30", "got 0"]),
        # 1/floor must stay finite in float32.
        ("grpo_s", {"entropy_floor": 1e-40}, ["grpo_s", "entropy_floor", ">= 1e-30", "1e-40"]),
        ("gtpo", {"correction": 2}, ["gtpo", "correction", ">= 0, <= 1", "2"]),
        ("gtpo", {"correction": 0.5}, ["gtpo", "correction", "a whole number", "0.5"]),
        ("gtpo", {"eps": -1e-9}, ["gtpo", "eps", ">= 0"]),
        ("gtpo", {"normalise": "jiont"}, ["gtpo", "normalise", "joint, zero_filled, own_set",
                                          "did you mean 'joint'?", "'jiont'"]),
        ("gtpo", {"normalise": 3}, ["gtpo", "normalise", "one of", "3"]),
        ("gtpo", {"normalise_over": ["batch"]}, ["gtpo", "normalise_over", "one of group, batch"]),
        ("gtpo", {"entropy_range": "0.2"}, ["gtpo", "entropy_range", "two numbers", "'0.2'"]),
        ("gtpo", {"entropy_range": 0.2}, ["gtpo", "entropy_range", "two numbers", "0.2"]),
        ("gtpo", {"entropy_range": (1, 2, 3)}, ["gtpo", "entropy_range", "two numbers"]),
        ("gtpo", {"entropy_range": (0.3, 0.2)}, ["gtpo", "entropy_range", "0 <= low <= high"]),
        ("gtpo", {"entropy_range": (-1, 0.2)}, ["gtpo", "entropy_range", "0 <= low <= high"]),
        ("gtpo", {"entropy_range": (0, math.inf)}, ["gtpo", "entropy_range", "finite"]),
        ("grpo_s", {"normalise": "own_set"}, ["grpo_s", "normalise", "joint, zero_filled"]),
        ("grpo_s", {"alpha2": 0.1}, ["grpo_s", "'alpha2'", "options: beta1, beta2"]),
        ("grpo_s", {"beta1": 0, "beta2": 0}, ["grpo_s", "beta1 and beta2 cannot both be 0"]),
        ("dapo", {"filter_uniform": 1}, ["dapo", "filter_uniform", "true or false", "1"]),
        ("dapo", {"filter_uniform": "yes"}, ["dapo", "filter_uniform", "true or false", "'yes'"]),
        ("datc", {"freeze": "eos,,x"}, ["datc", "freeze", "names separated by commas, or none"]),
        ("datc", {"freeze": 3}, ["datc", "freeze", "names separated by commas", "3"]),
        ("datc", {"freeze": [1]}, ["datc", "freeze", "names separated by commas", "[1]"]),
        ("datc", {"freeze": {"eos": 1}}, ["datc", "freeze", "names separated by commas"]),
        ("datc", {"bound": 0.5}, ["datc", "bound", ">= 1", "0.5"]),
        ("datc", {"tau": 0}, ["datc", "tau", "> 0", "0"]),
        ("datc", {"alignment": "cosin"}, ["datc", "alignment", "did you mean 'cosine'?"]),
        ("datc", {"std_floor": -1}, ["datc", "std_floor", ">= 0"]),
        ("datc_random", {"alignment": "cosine"}, ["datc_random", "unknown option 'alignment'"]),
        ("gpto", {}, ["unknown method 'gpto'", "did you mean 'gtpo'?", "known: grpo, dr_grpo"]),
        ("GTPO", {}, ["unknown method 'GTPO'", "did you mean 'gtpo'?"]),
        ("GRPO-S", {}, ["unknown method 'GRPO-S'", "did you mean 'grpo_s'?"]),
        ("zzz", {}, ["unknown method 'zzz'; known:"]),
        ("", {}, ["unknown method ''; known:"]),
        (GTPO(), {"alpha2": 0.3}, ["gtpo", "options go into the rule object", "alpha2"]),
        (GTPO, {}, ["a method's name or a rule object", "GTPO()"]),
        (None, {}, ["a method's name or a rule object", "None"]),
        (["gtpo"], {}, ["a method's name or a rule object", "['gtpo']"]),
    ],
    ids=str,
)  # fmt: skip
def test_refusals(name: Any, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        assign(PLAIN, name, **options)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_objects_check_their_options_too() -> None:
    with pytest.raises(InputError, match="gtpo: option alpha2 must be >= 0"):
        GTPO(alpha2=-1)
    with pytest.raises(TypeError, match="alpha_2"):
        GTPO(alpha_2=1)  # type: ignore[call-arg]
    assert GTPO(alpha2="0.3").alpha2 == 0.3  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gtpo", "grpo_s"])
def test_a_missing_signal_is_named_with_the_way_to_get_it(name: str) -> None:
    for rollouts in (PLAIN, PLAIN.replace(signals={"logprob": torch.zeros(2, 1)})):
        with pytest.raises(MissingSignalError) as caught:
            assign(rollouts, name)
        message = str(caught.value)
        for word in (name, "'entropy'", "nats", "Rollouts(entropy=...)", "CreditGRPOTrainer"):
            assert word in message, message


@pytest.mark.parametrize(
    ("rule", "missing"),
    [
        ("datc", "work"),
        (DATC(alignment="projection"), "projection"),
        (DATC(alignment="cosine"), "cosine"),
        ("datc_flipped", "work"),
        ("datc_shuffled", "work"),
        ("datc_random", "work_random"),
        ("datc_norm_product", "reward_norm"),
        ("datc_grad_x_input", "grad_x_input"),
    ],
    ids=str,
)
def test_a_missing_alignment_is_named(rule: Any, missing: str) -> None:
    rollouts = PLAIN.replace(signals={"entropy": torch.zeros(2, 1)})
    with pytest.raises(MissingSignalError, match=f"no signal '{missing}' "):
        assign(rollouts, rule)


def test_needs_follow_the_options() -> None:
    assert DATC(alignment="natural").needs == ("natural",)
    assert methods()["datc_norm_product"].needs == ("reward_norm", "update_norm")
    with pytest.raises(TypeError, match="alignment"):
        DATCRandom(alignment="cosine")  # type: ignore[call-arg]


def test_missing_extra() -> None:
    error = MissingExtraError("trl", "trl", "CreditGRPOTrainer")
    assert "pip install 'tokencredit[trl]'" in str(error) and isinstance(error, ImportError)


def test_nearest() -> None:
    assert nearest("apha1", ["alpha1", "beta1"]) == " (did you mean 'alpha1'?)"
    assert nearest("", ["alpha1"]) == ""
    assert nearest("x", []) == ""


SHIPPED = sorted(n for n, m in methods().items() if m.rule.__module__.startswith("tokencredit.m"))
"""Other tests, and the lab, register rules of their own."""


@pytest.mark.parametrize("name", SHIPPED)
def test_the_registry_describes_what_the_class_does(name: str) -> None:
    method = methods()[name]
    rule = method.rule()
    assert method.name == rule.name == name
    assert method.title and method.paper.startswith(("arXiv:", "DATC (2026)")) and method.acts_on
    assert method.needs == rule.needs and method.recipe == rule.recipe
    assert [o.name for o in method.options] == list(rule.options())
    for o in method.options:
        assert o.help and o.default == rule.options()[o.name]
        assert o.range and o.kind
    assert isinstance(rule, Rule) and hash(rule) == hash(method.rule())
    assert not rule.whole_batch


def test_whole_batch() -> None:
    assert GTPO(share_over="batch").whole_batch
    assert GTPO(normalise_over="batch").whole_batch
    assert GRPO_S(normalise_over="batch").whole_batch


def test_recipes() -> None:
    surrogates = {name: m.recipe.surrogate for name, m in methods().items()}
    assert surrogates["grpo"].aggregation == "seq-mean-token-mean"
    assert surrogates["dr_grpo"].aggregation == "seq-mean-token-sum-norm"
    assert surrogates["gtpo"].aggregation == "token-mean"
    assert (surrogates["dapo"].clip_low, surrogates["dapo"].clip_high) == (0.2, 0.28)
    assert methods()["dapo"].recipe.mask_truncated and methods()["dapo"].recipe.filter_uniform
    assert not DAPO(filter_uniform=False).recipe.filter_uniform
    assert surrogates["grpo_s"].ratio == "sequence_arithmetic"
    assert GRPO_S(ratio="geometric").recipe.surrogate.ratio == "sequence_geometric"
    assert all(s.ratio == "token" for n, s in surrogates.items() if n != "grpo_s")
    assert GRPO().recipe.kl == 0
