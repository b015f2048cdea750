"""Estimators, losses, worker and trainer in SkyRL's own classes and functions, on a CPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("skyrl", reason="skyrl is not installed: `make skyrl` makes its environment")

from skyrl.backends.skyrl_train.utils import ppo_utils
from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase
from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer
from skyrl.train.trainer import RayPPOTrainer
from skyrl_harness import (
    LENGTHS,
    SCORES,
    UIDS,
    T,
    batch,
    configuration,
    entropies,
    tiny_model,
    trainer,
    worker,
)

from tokencredit import InputError, MissingSignalError, Rollouts, Surrogate, assign, policy_loss
from tokencredit.engines.skyrl import credit_trainer, register
from tokencredit.engines.skyrl.estimators import BESIDE, Beside

METHODS = ["grpo", "dr_grpo", "dapo", "gtpo", "grpo_s"]
LOSS = "trainer.algorithm.policy_loss_type="
GRPO_S = ["tokencredit_grpo_s", LOSS + "tokencredit_sequence_arithmetic"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(autouse=True)
def the_cpu_is_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))


def chosen() -> torch.Tensor:
    """The policy's own tokens; of the row that a filter took out of the loss, all."""
    data = batch()
    mask = data["loss_mask"].clone()
    mask[5] = data["response_mask"][5]
    return mask.bool()


def right_padded(values: torch.Tensor) -> torch.Tensor:
    """The same tokens with the padding on the other side."""
    moved = torch.zeros_like(values)
    for i, length in enumerate(LENGTHS):
        moved[i, :length] = values[i, T - length :]
    return moved


# -- registration ------------------------------------------------------------------------------


def test_everything_is_registered_and_skyrls_own_stays():
    names = register()
    assert names == register() and names["gtpo"] == names["tokencredit_gtpo"] == "gtpo"
    assert "grpo" not in names
    there = ppo_utils.AdvantageEstimatorRegistry.list_available()
    assert {f"tokencredit_{m}" for m in METHODS} <= set(there)
    assert "tokencredit_sequence_arithmetic" in ppo_utils.PolicyLossRegistry.list_available()
    own = ppo_utils.AdvantageEstimatorRegistry.get("grpo")
    assert "compute_grpo_outcome_advantage" in own.__qualname__


def test_functions_travel_to_other_processes_as_references():
    """SkyRL copies its registries by cloudpickle."""
    import cloudpickle

    register()
    for registry, name in (
        (ppo_utils.AdvantageEstimatorRegistry, "tokencredit_gtpo"),
        (ppo_utils.PolicyLossRegistry, "tokencredit_sequence_arithmetic"),
    ):
        sent = cloudpickle.dumps(registry.get(name))
        assert len(sent) < 500
        assert cloudpickle.loads(sent).keywords == registry.get(name).keywords


@pytest.mark.slow
def test_another_ray_process_finds_them():
    code = """
import sys, typing, typing_extensions
if sys.version_info < (3, 12): typing.TypedDict = typing_extensions.TypedDict
import ray, torch
from tokencredit.engines.skyrl import register
from skyrl.backends.skyrl_train.utils import ppo_utils
register()
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
ppo_utils.sync_registries()

@ray.remote
def elsewhere():
    import sys, typing, typing_extensions
    if sys.version_info < (3, 12): typing.TypedDict = typing_extensions.TypedDict
    from skyrl.backends.skyrl_train.utils import ppo_utils
    rewards, mask = torch.tensor([[0., 1.], [0., 0.]]), torch.ones(2, 2)
    got, _ = ppo_utils.compute_advantages_and_returns(
        rewards, mask, ["a", "a"], "tokencredit_grpo", None)
    return got.tolist()

print(ray.get(elsewhere.remote()))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith("[[0.7071")


# -- estimators in SkyRL's function ------------------------------------------------------------


def by_skyrl(name, rewards, mask, uids, beside=None, config=None):
    register()
    token = BESIDE.set(beside or Beside())
    try:
        return ppo_utils.compute_advantages_and_returns(
            rewards, mask, uids, name, config, values=None, gamma=1.0, lambd=1.0
        )[0]
    finally:
        BESIDE.reset(token)


@pytest.mark.parametrize("name", [*(f"tokencredit_{m}" for m in METHODS), *METHODS[1:]])
def test_padding_on_the_left_gives_the_numbers_of_padding_on_the_right(name):
    data, entropy = batch(), torch.rand(8, T, generator=torch.Generator().manual_seed(3)) + 0.1
    mask = data["response_mask"]
    got = by_skyrl(name, data["rewards"], mask, UIDS, Beside(entropy=entropy))
    rollouts = Rollouts(
        torch.tensor(SCORES), UIDS, right_padded(mask), entropy=right_padded(entropy)
    )
    want = assign(rollouts, name.removeprefix("tokencredit_")).advantage
    assert torch.allclose(right_padded(got), want, atol=1e-6)
    assert bool((got[mask == 0] == 0).all()) and bool((got != 0).any())


def test_grpo_is_skyrls_grpo():
    data = batch()
    ours = by_skyrl("tokencredit_grpo", data["rewards"], data["response_mask"], UIDS)
    own = by_skyrl("grpo", data["rewards"], data["response_mask"], UIDS)
    assert torch.allclose(ours, own, atol=1e-5)  # it adds 1e-6 to the standard deviation


def test_rewards_may_lie_on_any_token():
    """SkyRL's generators may return a reward a token."""
    data = batch()
    spread = data["response_mask"] * data["rewards"].sum(1, keepdim=True)
    spread = spread / data["response_mask"].sum(1, keepdim=True)
    ours = by_skyrl("tokencredit_grpo", spread, data["response_mask"], UIDS)
    want = by_skyrl("tokencredit_grpo", data["rewards"], data["response_mask"], UIDS)
    assert torch.allclose(ours, want, atol=1e-6)


def test_missing_entropies_name_the_cure():
    data = batch()
    for name in ("tokencredit_gtpo", "grpo_s"):
        with pytest.raises(MissingSignalError, match=r"-m tokencredit\.engines\.skyrl"):
            by_skyrl(name, data["rewards"], data["response_mask"], UIDS)
    with pytest.raises(InputError, match="no uids"):
        by_skyrl("tokencredit_grpo", data["rewards"], data["response_mask"], None)


def test_options_stand_in_the_algorithms_section():
    cfg = configuration(
        "gtpo", "trainer.algorithm.tokencredit.alpha2=0.7",
        "trainer.algorithm.tokencredit.entropy_range=[0.5,2.0]",
    )  # fmt: skip
    data, entropy = batch(), torch.rand(8, T, generator=torch.Generator().manual_seed(3)) * 3
    got = by_skyrl(
        "gtpo", data["rewards"], data["response_mask"], UIDS, Beside(entropy=entropy),
        cfg.trainer.algorithm,
    )  # fmt: skip
    rollouts = Rollouts(torch.tensor(SCORES), UIDS, data["response_mask"], entropy=entropy)
    want = assign(rollouts, "gtpo", alpha2=0.7, entropy_range=(0.5, 2.0)).advantage
    assert torch.allclose(got, want, atol=1e-6)


# -- policy losses -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "level", ["token", "sequence_arithmetic", "sequence_geometric", "gspo_token"]
)
def test_losses_are_those_of_policy_loss(level):
    register()
    cfg = configuration("tokencredit_grpo", LOSS + f"tokencredit_{level}").trainer.algorithm
    generator = torch.Generator().manual_seed(5)
    new = (torch.randn(8, T, generator=generator) * 0.3).requires_grad_()
    old = torch.randn(8, T, generator=generator) * 0.3
    advantage, mask = torch.randn(8, T, generator=generator), batch()["loss_mask"]
    loss, metrics = ppo_utils.PolicyLossRegistry.get(f"tokencredit_{level}")(
        new, old, advantage, config=cfg, loss_mask=mask
    )
    (got,) = torch.autograd.grad(loss, new)
    surrogate = Surrogate(level, 0.2, 0.2, "token-mean")
    want = policy_loss(new, old, advantage, mask.bool(), surrogate, denominator=1.0)
    (expected,) = torch.autograd.grad(want, new)
    assert torch.allclose(loss, want, atol=1e-5) and torch.allclose(got, expected, atol=1e-6)
    assert 0 < metrics["clip_ratio"] < 1
    own = {"token": "regular", "gspo_token": "gspo"}.get(level)
    if own is not None:
        theirs = configuration("tokencredit_grpo", LOSS + own).trainer.algorithm
        same, _ = ppo_utils.PolicyLossRegistry.get(own)(
            new, old, advantage, config=theirs, loss_mask=mask
        )
        assert torch.allclose(loss, same, atol=1e-5)


# -- worker and trainer ------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [-1, 20])
@pytest.mark.parametrize("temperature", ["1.0", "0.7"])
def test_the_worker_returns_entropies_beside_log_probabilities(model, tokens, temperature):
    """By micro-batches of rows, and by SkyRL's packing of tokens, which reorders rows."""
    cfg = configuration(
        "gtpo", f"trainer.max_tokens_per_microbatch={tokens}",
        f"trainer.algorithm.temperature={temperature}",
    )  # fmt: skip
    data = batch().select(["sequences", "attention_mask"], ["response_length"])
    own = worker(cfg, model, FSDPPolicyWorkerBase).forward(data).loss_fn_outputs
    got = worker(cfg, model).forward(data).loss_fn_outputs
    assert [one["logprobs"] for one in got] == [one["logprobs"] for one in own]
    entropy = torch.tensor([one["entropy"] for one in got])
    inside = batch()["response_mask"].bool()
    want = entropies(model, batch(), float(temperature))
    assert torch.allclose(entropy[inside], want[inside], atol=1e-5)


@pytest.mark.parametrize("base", [RayPPOTrainer, FullyAsyncRayPPOTrainer])
@pytest.mark.parametrize("staged", ["true", "false"])
@pytest.mark.parametrize("estimator", [["tokencredit_gtpo"], GRPO_S])
def test_the_trainers_own_passes_give_assigns_numbers(model, base, staged, estimator):
    cfg = configuration(
        *estimator, f"trainer.recompute_old_logprobs_per_minibatch={staged}"
    )  # fmt: skip
    one, data = trainer(cfg, model, base), batch()
    data = one.compute_advantages_and_returns(one.fwd_logprobs_values_reward(data))
    assert one.dispatch.calls == (["policy staged"] if staged == "true" else ["policy"])
    rollouts = Rollouts(torch.tensor(SCORES), UIDS, chosen(), entropy=entropies(model, batch()))
    credit = assign(rollouts, estimator[0].removeprefix("tokencredit_"))
    assert torch.allclose(data["advantages"], credit.advantage, atol=1e-4)
    assert not data["advantages"][2, T - 4 : T - 2].any()  # a tool's tokens earn nothing
    assert one.all_metrics["credit/sign_flips"] == credit.diagnostics["sign_flips"]
    # An entropy off by one token would not have passed.
    off = assign(rollouts.replace(entropy=entropies(model, batch()).roll(1, 1)), "gtpo")
    if estimator[0] == "tokencredit_gtpo":
        assert not torch.allclose(data["advantages"], off.advantage, atol=1e-3)


def test_rows_that_fill_a_batch_are_in_no_statistic(model):
    """Copies of the first row, with names and masks of their own."""
    cfg = configuration("gtpo", "trainer.recompute_old_logprobs_per_minibatch=false")
    alone = trainer(cfg, model)
    want = alone.compute_advantages_and_returns(alone.fwd_logprobs_values_reward(batch()))
    one = trainer(cfg, model)
    got = one.compute_advantages_and_returns(one.fwd_logprobs_values_reward(batch(padding=3)))
    assert torch.allclose(got["advantages"][:8], want["advantages"], atol=1e-6)
    assert not got["advantages"][8:].any()
    assert one.all_metrics["credit/sign_flips"] == alone.all_metrics["credit/sign_flips"]


def test_success_is_the_score_before_a_kl_penalty(model):
    cfg = configuration(
        "gtpo", "trainer.algorithm.use_kl_in_reward=true", "trainer.algorithm.kl_loss_coef=100"
    )  # fmt: skip
    one, data = trainer(cfg, model), batch()
    one.reward_kl_controller = None
    data = one.fwd_logprobs_values_reward(data)
    data["base_action_log_probs"] = data["action_log_probs"] - 1.0
    data = one.apply_reward_kl_penalty(data)
    assert (data["rewards"].sum(dim=1) > 0.5).sum() == 1  # of the row that a filter left out
    got = one.compute_advantages_and_returns(data)
    rollouts = Rollouts(torch.tensor(SCORES), UIDS, chosen(), entropy=entropies(model, batch()))
    assert torch.allclose(got["advantages"], assign(rollouts, "gtpo").advantage, atol=1e-4)


def test_entropies_of_one_batch_are_not_used_for_another(model):
    one = trainer(configuration(), model)
    one.fwd_logprobs_values_reward(batch())
    one.compute_advantages_and_returns(one.fwd_logprobs_values_reward(batch()))
    another = batch()
    another["values"] = None
    with pytest.raises(MissingSignalError):
        one.compute_advantages_and_returns(another)


def test_with_another_estimator_the_trainer_is_skyrls(model):
    cfg = configuration("grpo", "generator.n_samples_per_prompt=4")
    plain = RayPPOTrainer.__new__(RayPPOTrainer)
    one = trainer(cfg, model)
    plain.cfg, plain.ref_model, plain.all_metrics = cfg, None, {}
    plain.dispatch = one.dispatch
    one.dispatch.policy = worker(cfg, model, FSDPPolicyWorkerBase)
    results = [
        it.compute_advantages_and_returns(it.fwd_logprobs_values_reward(batch()))
        for it in (plain, one)
    ]
    for key in ("advantages", "returns", "action_log_probs"):
        assert torch.equal(results[0][key], results[1][key])
    assert plain.all_metrics == one.all_metrics


def test_models_are_built_with_the_worker_that_forms_entropies(monkeypatch):
    built = []
    monkeypatch.setattr(
        RayPPOTrainer, "build_models", lambda self, policy, *_: built.append(policy)
    )
    trainer(configuration("gtpo")).build_models("theirs", None, None)
    assert "EntropyPolicyWorker" in repr(built.pop())
    for estimator in ("tokencredit_grpo", "grpo"):
        trainer(configuration(estimator)).build_models("theirs", None, None)
        assert built.pop() == "theirs"


def test_the_constructor_refuses_what_the_command_refuses(monkeypatch):
    cfg = configuration()
    cfg.trainer.algorithm = replace(cfg.trainer.algorithm, policy_loss_type="gspo")
    monkeypatch.setattr(RayPPOTrainer, "__init__", lambda self, cfg: pytest.fail("reached"))
    with pytest.raises(InputError, match="policy_loss_type=regular"):
        credit_trainer(RayPPOTrainer)(cfg)


# -- trainers of one's own ---------------------------------------------------------------------


def permuted(data, order):
    rows = {key: value[order] for key, value in data.items() if value is not None}
    made = type(data)(rows)
    made.metadata = data.metadata | {"uids": [data.metadata["uids"][i] for i in order]}
    for key, value in data.items():
        if value is None:
            made[key] = None
    return made


@pytest.mark.parametrize("when", ["between the passes", "before the advantages"])
def test_rows_that_a_subclass_reorders_keep_what_is_theirs(model, when):
    order = [7, 2, 5, 0, 3, 6, 1, 4]

    class Reordering(RayPPOTrainer):
        def fwd_logprobs_values_reward(self, data):
            data = super().fwd_logprobs_values_reward(data)
            return permuted(data, order) if when == "between the passes" else data

        def compute_advantages_and_returns(self, data):
            data = permuted(data, order) if when == "before the advantages" else data
            return super().compute_advantages_and_returns(data)

    def advantages_of(base):
        one = trainer(configuration(), model, base)
        data = one.compute_advantages_and_returns(one.fwd_logprobs_values_reward(batch()))
        assert not [key for key in data if key.startswith("tokencredit")]
        return data["advantages"]

    straight, got = advantages_of(RayPPOTrainer), advantages_of(Reordering)
    assert torch.allclose(got, straight[order], atol=1e-5)
    assert not torch.allclose(got, straight, atol=1e-2)


def test_rewards_that_a_subclass_forms_late_are_read(model):
    class RewardModel(RayPPOTrainer):
        def fwd_logprobs_values_reward(self, data):
            data = super().fwd_logprobs_values_reward(data)
            data["rewards"] = batch()["rewards"]
            return data

    data = batch()
    data["rewards"] = torch.zeros_like(data["rewards"])
    one = trainer(configuration(), model, RewardModel)
    got = one.compute_advantages_and_returns(one.fwd_logprobs_values_reward(data))
    rollouts = Rollouts(torch.tensor(SCORES), UIDS, chosen(), entropy=entropies(model, batch()))
    assert torch.allclose(got["advantages"], assign(rollouts, "gtpo").advantage, atol=1e-4)


def test_a_trainer_is_wrapped_once_and_only_skyrls():
    once = credit_trainer(RayPPOTrainer)
    assert credit_trainer(once) is once
    with pytest.raises(InputError, match="needs SkyRL's RayPPOTrainer"):
        credit_trainer(dict)


def test_an_estimator_that_somebody_else_registered_is_theirs():
    registry = ppo_utils.AdvantageEstimatorRegistry
    register()
    ours = registry.get("dapo")
    registry.unregister("dapo")
    registry.register("dapo", lambda **_: None)
    try:
        assert "dapo" not in register() and register()["tokencredit_dapo"] == "dapo"
        configuration("dapo", "trainer.algorithm.advantage_batch_normalize=true")  # not refused
    finally:
        registry.unregister("dapo")
        registry.register("dapo", ours)
    assert register()["dapo"] == "dapo"


def test_a_rule_that_is_not_registered_in_this_process_is_said():
    from functools import partial

    from tokencredit.engines.skyrl.estimators import estimate

    data = batch()
    with pytest.raises(InputError, match="once its module is imported, in the process of the"):
        partial(estimate, name="tokencredit_mine")(data["rewards"], data["response_mask"], UIDS)


# -- the command -------------------------------------------------------------------------------


def test_the_command_reads_options_and_refuses_in_one_line():
    cfg = configuration("gtpo", "trainer.override_entrypoint=tokencredit.engines.skyrl.entrypoint")
    assert cfg.trainer.algorithm.tokencredit == {}
    with pytest.raises(InputError, match=r"trainer\.strategy=megatron"):
        configuration("gtpo", "trainer.strategy=megatron")


@pytest.mark.parametrize(
    ("estimator", "words"),
    [("tokencredit_gtop", "did you mean 'gtpo'"), ("tokencredit_datc", "datc needs work")],
)
def test_a_misspelt_estimator_is_one_line(estimator, words):
    with pytest.raises(InputError, match=words):
        configuration(estimator)


@pytest.mark.parametrize(
    "module",
    [
        ["tokencredit.engines.skyrl"],
        ["skyrl.train.entrypoints.main_base",
         "trainer.override_entrypoint=tokencredit.engines.skyrl.entrypoint"],
    ],
)  # fmt: skip
def test_both_commands_stop_before_anything_is_loaded(module):
    shim = (
        "import sys, typing, typing_extensions, runpy\n"
        "if sys.version_info < (3, 12): typing.TypedDict = typing_extensions.TypedDict\n"
        "sys.argv = sys.argv[1:]\nrunpy.run_module(sys.argv[0], run_name='__main__', alter_sys=1)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", shim, *module,
         "trainer.algorithm.advantage_estimator=tokencredit_gtpo",
         "trainer.algorithm.tokencredit.alpa2=0.2"],
        text=True, capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .startswith("tokencredit: trainer.algorithm.tokencredit.alpa2: gtpo has no such option")
    )


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="SkyRL can be imported there")
def test_a_python_that_skyrl_cannot_be_imported_on_is_said():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tokencredit.engines.skyrl"],
        text=True, capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "use Python 3.12 or newer" in done.stderr
