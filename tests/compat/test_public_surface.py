"""The public surface: names, signatures, defaults. A change here is a change for users."""

import dataclasses
import importlib
import inspect
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

import tokencredit
from tokencredit import (
    DAPO,
    DATC,
    GRPO,
    GRPO_S,
    GTPO,
    Credit,
    DrGRPO,
    Recipe,
    Rollouts,
    Rule,
    Surrogate,
    assign,
    importance_ratio,
    loss_denominator,
    methods,
    policy_loss,
)

PUBLIC = [
    "DAPO",
    "DATC",
    "GRPO",
    "GRPO_S",
    "GTPO",
    "Credit",
    "DrGRPO",
    "InputError",
    "Method",
    "MissingExtraError",
    "MissingSignalError",
    "Option",
    "Recipe",
    "Rollouts",
    "Rule",
    "Surrogate",
    "TokenCreditError",
    "__version__",
    "assign",
    "finish",
    "grpo_advantage",
    "importance_ratio",
    "loss_denominator",
    "methods",
    "option",
    "policy_loss",
    "register",
    "resolve",
    "soft_overlong_punishment",
    "view",
]


def test_all() -> None:
    assert sorted(tokencredit.__all__) == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(tokencredit, name) is not None


def parameters(function: Any) -> list[tuple[str, str, Any]]:
    """Name, kind and default of each parameter."""
    short = {
        inspect.Parameter.POSITIONAL_OR_KEYWORD: "",
        inspect.Parameter.KEYWORD_ONLY: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    return [
        (p.name, short[p.kind], p.default) for p in inspect.signature(function).parameters.values()
    ]


NO = inspect.Parameter.empty


def test_rollouts() -> None:
    assert parameters(Rollouts) == [
        ("rewards", "", NO),
        ("group", "", NO),
        ("mask", "", NO),
        ("success", "*", None),
        ("real", "*", None),
        ("keep", "*", None),
        ("base", "*", None),
        ("signals", "*", None),
        ("token_ids", "*", None),
        ("entropy", "*", None),
        ("work", "*", None),
    ]
    assert {f.name for f in dataclasses.fields(Rollouts)} == {
        "rewards", "group", "mask", "success", "real", "keep", "base", "signals", "token_ids",
        "groups",
    }  # fmt: skip
    for name in ("responses", "device", "live", "live_as", "replace", "to"):
        assert hasattr(Rollouts, name)


def test_assign() -> None:
    assert parameters(assign) == [("rollouts", "", NO), ("rule", "", NO), ("options", "**", NO)]


def test_view() -> None:
    assert parameters(tokencredit.view) == [
        ("rollouts", "", NO), ("credit", "*", ()), ("tokens", "*", None), ("by", "*", None),
        ("against", "*", None), ("limit", "*", None), ("step", "*", None), ("title", "*", None),
    ]  # fmt: skip


def test_credit() -> None:
    public = {f.name for f in dataclasses.fields(Credit) if not f.name.startswith("_")}
    assert public == {"advantage", "base", "in_loss", "reward", "weight", "rule"}
    assert isinstance(inspect.getattr_static(Credit, "diagnostics").__doc__, str)


def test_losses() -> None:
    assert [f.name for f in dataclasses.fields(Surrogate)] == [
        "ratio", "clip_low", "clip_high", "aggregation",
    ]  # fmt: skip
    assert Surrogate() == Surrogate("token", 0.2, 0.2, "token-mean")
    assert parameters(policy_loss) == [
        ("logprob", "", NO),
        ("old_logprob", "", NO),
        ("advantage", "", NO),
        ("mask", "", NO),
        ("surrogate", "", None),
        ("denominator", "*", None),
        ("max_length", "*", None),
    ]
    assert parameters(loss_denominator) == [
        ("mask", "", NO), ("aggregation", "", NO), ("max_length", "*", None),
    ]  # fmt: skip
    assert parameters(importance_ratio) == [
        ("logprob", "", NO), ("old_logprob", "", NO), ("mask", "", NO), ("level", "", "token"),
    ]  # fmt: skip


DEFAULTS: dict[type[Rule], dict[str, Any]] = {
    GRPO: {"scale": "group", "correction": 1, "eps": 0.0},
    DrGRPO: {},
    DAPO: {"filter_uniform": True, "correction": 1, "eps": 0.0},
    GTPO: {
        "alpha1": 1.0,
        "alpha2": 0.1,
        "normalise": "joint",
        "normalise_over": "group",
        "share_over": "group",
        "uniform_groups": "zero",
        "entropy_floor": 1e-6,
        "entropy_range": None,
        "correction": 1,
        "eps": 0.0,
    },
    GRPO_S: {
        "beta1": 1.0,
        "beta2": 0.1,
        "normalise": "joint",
        "normalise_over": "group",
        "share_over": "group",
        "uniform_groups": "zero",
        "entropy_floor": 1e-6,
        "entropy_range": None,
        "entropy_mean": "arithmetic",
        "ratio": "arithmetic",
        "correction": 1,
        "eps": 0.0,
    },
    DATC: {
        "alignment": "work",
        "bound": 4.0,
        "tau": 1.0,
        "weight_map": "band",
        "direction": "advantage",
        "freeze": ("eos", "structural"),
        "std_floor": 1e-3,
    },
}
CHOICES = {
    (GRPO, "scale"): ("group", "batch", "none"),
    (GTPO, "normalise"): ("joint", "zero_filled", "own_set"),
    (GTPO, "normalise_over"): ("group", "batch"),
    (GTPO, "share_over"): ("group", "batch"),
    (GTPO, "uniform_groups"): ("zero", "literal"),
    (GRPO_S, "normalise"): ("joint", "zero_filled"),
    (GRPO_S, "normalise_over"): ("group", "batch"),
    (GRPO_S, "share_over"): ("group", "batch"),
    (GRPO_S, "uniform_groups"): ("zero", "literal"),
    (GRPO_S, "entropy_mean"): ("arithmetic", "geometric"),
    (GRPO_S, "ratio"): ("arithmetic", "geometric"),
    (DATC, "alignment"): ("work", "projection", "cosine", "natural"),
    (DATC, "weight_map"): ("band", "box"),
    (DATC, "direction"): ("advantage", "sign"),
}


@pytest.mark.parametrize("rule", list(DEFAULTS), ids=lambda r: r.__name__)
def test_options_in_order_with_defaults(rule: type[Rule]) -> None:
    want = DEFAULTS[rule]
    assert [(name, default) for name, _, default in parameters(rule)] == list(want.items())
    assert rule().options() == want
    assert [type(v) for v in rule().options().values()] == [type(v) for v in want.values()]
    for spec in rule.option_list():
        assert spec.choices == CHOICES.get((rule, spec.name))


def test_registry() -> None:
    names = {"grpo": GRPO, "dr_grpo": DrGRPO, "dapo": DAPO, "gtpo": GTPO, "grpo_s": GRPO_S,
             "datc": DATC}  # fmt: skip
    registry = methods()
    assert isinstance(registry, Mapping)
    assert {name: registry[name].rule for name in names} == names
    assert {name: registry[name].needs for name in names} == {
        "grpo": (), "dr_grpo": (), "dapo": (), "gtpo": ("entropy",), "grpo_s": ("entropy",),
        "datc": ("work",),
    }  # fmt: skip
    fields = {f.name for f in dataclasses.fields(registry["gtpo"])}
    assert fields >= {"name", "title", "paper", "needs", "acts_on", "options", "recipe", "rule"}
    controls = {"flipped", "random", "norm_product", "grad_x_input", "shuffled"}
    assert {f"datc_{control}" for control in controls} <= set(registry)
    package = importlib.import_module("tokencredit.methods")
    assert {registry[f"datc_{control}"].rule.__name__ for control in controls} <= set(
        package.__all__
    )
    with pytest.raises(TypeError):
        registry["gtpo"] = registry["grpo"]  # type: ignore[index]


@pytest.mark.parametrize(
    "thing", [GTPO(), GRPO_S(), GRPO(), DrGRPO(), DAPO(), DATC(), Surrogate(), Recipe(Surrogate())]
)
def test_frozen(thing: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        thing.name = "other"
    with pytest.raises(dataclasses.FrozenInstanceError):
        thing.alpha1 = 2.0
    assert hash(thing) == hash(dataclasses.replace(thing))


def test_importing_needs_torch_and_little_else() -> None:
    heavy = [
        "accelerate", "datasets", "matplotlib", "pandas", "peft", "reasoning_gym", "safetensors",
        "tokenizers", "transformers", "trl", "verl", "vllm", "yaml", "zstandard",
    ]  # fmt: skip
    code = (
        "import sys, torch; before = set(sys.modules); import tokencredit; "
        f"print(sorted((set(sys.modules) - before) & set({heavy!r})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_engines_stay_out_even_with_torch() -> None:
    code = (
        "import sys, tokencredit; "
        "print(sorted({'transformers', 'trl', 'datasets', 'accelerate', 'matplotlib'} "
        "& set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
