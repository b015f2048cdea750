import random
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tokencredit.errors import InputError
from tokencredit.lab import (
    Chain,
    Countdown,
    build_reward_model,
    draw_prompts,
    load_policy,
    load_reward_model,
    localisation,
    reward_model_accuracy,
    reward_model_metadata,
    reward_models,
    reward_recipe,
    reward_training,
    setting,
)
from tokencredit.signals.reward_gradient import reward_gradients

TINY = replace(
    setting("chain-qwen3"),
    name="tiny",
    task=Chain(steps=1, fillers=0),
    layers=1,
    width=16,
    heads=2,
    warmup_batch_size=4,
    warmup_steps=3,
    target_accuracy=None,
)
TINY_COUNTDOWN = replace(TINY, task=Countdown(numbers=2, high=4, maximum=16), name="tiny-countdown")
STEPS = replace(reward_recipe(TINY, "strong"), steps=3, batch_size=4)
NAMED = replace(STEPS, interpolate_from=0.5, name_results=True)
OUTCOMES = replace(reward_recipe(TINY, "weak"), steps=3, batch_size=4, samples=8)
MEASURED = {
    *("setting", "strength", "fingerprint", "policy", "labels", "seed", "steps", "threshold"),
    *("accuracy", "accuracy_interval", "base", "auc", "localisation", "version"),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENCREDIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(reward_models, "_FINAL_PROMPTS", 16)
    monkeypatch.setattr(reward_models, "_FINAL_RESPONSES", 4)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def shipped():
    return {strength: load_reward_model("chain-qwen3", strength) for strength in ("strong", "weak")}


def same_weights(one: Path, other: Path) -> bool:
    a, b = load_file(one), load_file(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("recipe", [STEPS, OUTCOMES], ids=lambda recipe: recipe.labels)
def test_the_seed_rebuilds_the_same_weights(recipe, tmp_path):
    before = torch.random.get_rng_state()
    one, same, other = (
        build_reward_model(TINY, tmp_path / str(i), strength=recipe, seed=seed)
        for i, seed in enumerate((0, 0, 1))
    )
    assert same_weights(one, same)
    assert not same_weights(one, other)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("recipe", [STEPS, OUTCOMES], ids=lambda recipe: recipe.labels)
def test_what_is_built_is_loaded(recipe, family, cache):
    variant = replace(TINY, family=family)
    told = []
    built = load_reward_model(variant, recipe, on_progress=lambda *a: told.append(a))
    assert told[-1][2] == pytest.approx(float(built.metadata["accuracy"]), abs=1e-4)
    told.clear()
    loaded = load_reward_model(variant, recipe, on_progress=lambda *a: told.append(a))
    assert told == []  # no second build
    assert loaded.metadata == built.metadata == reward_model_metadata(variant, recipe)
    assert loaded.model is not built.model and not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    weights = built.model.state_dict()
    for name, tensor in loaded.model.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, weights[name])
    [path] = cache.rglob("tiny-reward-*/model.safetensors")
    assert all(tensor.dtype == torch.float16 for tensor in load_file(path).values())


def test_a_build_says_how_it_came_about():
    assert reward_model_metadata(TINY, STEPS) is None
    metadata = load_reward_model(TINY, STEPS).metadata
    assert set(metadata) == MEASURED | {"step_accuracy", "step_base"}
    assert metadata["setting"] == "tiny" and metadata["labels"] == "steps"
    assert (metadata["strength"], metadata["seed"], metadata["steps"]) == ("strong", "0", "3")
    assert metadata["policy"] == TINY.fingerprint
    assert set(load_reward_model(TINY, OUTCOMES).metadata) == MEASURED


def test_another_seed_recipe_or_policy_is_another_model(cache):
    load_reward_model(TINY, STEPS)
    wanted = cache / f"tiny-reward-strong-{STEPS.fingerprint(TINY)}"
    assert (wanted / "model.safetensors").is_file()
    build_reward_model(TINY, wanted, strength=STEPS, seed=1)
    assert reward_model_metadata(TINY, STEPS) is None
    assert STEPS.fingerprint(TINY) == replace(STEPS, name="mine").fingerprint(TINY)
    variants = [replace(STEPS, steps=4), replace(STEPS, interpolate=False), OUTCOMES]
    variants += [replace(STEPS, interpolate_from=0.5), replace(STEPS, name_results=True)]
    prints = {each.fingerprint(TINY) for each in (STEPS, *variants)}
    assert len(prints | {STEPS.fingerprint(replace(TINY, seed=1))}) == 7


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_frozen_layers_are_the_policys(family):
    variant = replace(TINY, family=family)
    policy = load_policy(variant)[0].base_model.state_dict()
    # At a rate at which the norm moves further than float16 rounds.
    recipe = replace(STEPS, learning_rate=0.1)
    reward = load_reward_model(variant, recipe).model
    assert reward.config.num_hidden_layers == 3
    own = reward.base_model.state_dict()
    changed = {name for name in policy if not torch.equal(policy[name], own[name])}
    assert all(name.startswith(("norm.", "ln_f.")) for name in changed) and changed
    free = load_reward_model(variant, replace(recipe, frozen=False)).model.base_model.state_dict()
    assert any(not torch.equal(policy[name], free[name]) for name in set(policy) - changed)


def test_new_layers_learn_to_name_the_right_result():
    variant = replace(TINY, family="llama", task=replace(TINY.task, modulus=3))
    task, (policy, _) = variant.task, load_policy(variant)
    prompts = draw_prompts(task, 32, 5, held_out=False)
    rows = [(*prompt, *task.demonstration(prompt, random.Random(0))) for prompt in prompts]
    ids = torch.tensor([[task.vocabulary.index(word) for word in row] for row in rows])
    result = task.prompt_length + reward_training.deciding_positions(task)[0]
    named = {}
    for name_results in (True, False):
        recipe = replace(NAMED, steps=100, learning_rate=1e-2, name_results=name_results)
        model = reward_training.train_reward_model(variant, recipe, policy)
        table = model.get_input_embeddings()
        states = reward_training.token_states(model, table(ids), torch.ones_like(ids).bool())
        best = (states[:, result] @ table.weight.T).argmax(dim=-1)
        right = reward_training.right_results(task, ids)[:, 0]
        named[name_results] = float((best == right).float().mean())
    assert named[True] > 0.9 and named[False] < 0.6, named


def test_embeddings_are_mixed_only_after_their_share_of_the_steps():
    policy, _ = load_policy(TINY)
    model = reward_training.fresh_reward_model(TINY, STEPS)

    def losses(**changes):
        recipe = replace(STEPS, steps=4, **changes)
        return list(islice(reward_training._step_losses(TINY.task, recipe, model, policy), 4))

    plain, soon, late = losses(interpolate=False), losses(), losses(interpolate_from=0.5)
    assert plain[0] == soon[0] and plain[1] != soon[1]
    assert plain[:3] == late[:3] and plain[3] != late[3]


def test_positions_and_right_results_of_a_written_response():
    task = Chain(steps=2)
    written = "so 6 - 4 = 3 ; next 3 * 7 = 1 ; ans 1 <eos>"
    broken = written.replace("4", "ans")
    rows = [f"6 - 4 * 7 = {response}".split() for response in (written, broken)]
    positions = reward_training.deciding_positions(task)
    assert [rows[0][task.prompt_length + at] for at in positions] == ["3", "1"]
    ids = torch.tensor([[task.vocabulary.index(word) for word in row] for row in rows])
    right = reward_training.right_results(task, ids)
    assert [task.vocabulary[i] for i in right[0]] == ["2", "1"]  # 3 * 7 is judged as written
    assert right[1].tolist() == [-1, right[0, 1]]


def test_the_score_is_the_head_at_the_positions(shipped):
    reward = shipped["strong"]
    samples = reward_training.policy_samples(
        load_policy("chain-qwen3")[0], reward.setting.task, 4, seed=5, held_out=True
    )
    source = reward.source()
    [part] = reward_gradients(
        source, samples.ids, samples.attention, samples.response, micro_batch=4
    )
    with torch.no_grad():
        states = reward.model.base_model(input_ids=samples.ids).last_hidden_state
        values = reward.model.score(states)[:, 12:, 0]
    assert reward.positions == (5, 12, 19, 26, 33)
    mean = values[:, reward.positions].mean(dim=1)
    assert torch.allclose(part.score, mean, atol=1e-4)
    assert part.finite.all() and (part.gradient[:, :12] == 0).all()
    assert part.gradient[:, 17].abs().amax(dim=-1).min() > 0


def test_the_shipped_models_are_the_default_settings_own(shipped, cache):
    assert not cache.exists()  # nothing was built
    measured = {}
    for strength, reward in shipped.items():
        metadata = reward.metadata
        recipe = reward_recipe(setting(), strength)
        assert metadata["fingerprint"] == recipe.fingerprint(setting())
        assert (metadata["policy"], metadata["strength"]) == (setting().fingerprint, strength)
        # Other samples than those in the metadata; standard error at most 0.022.
        measured[strength] = accuracy = reward_model_accuracy(reward, prompts=512, seed=7)
        assert accuracy.outcome.accuracy == pytest.approx(float(metadata["accuracy"]), abs=0.07)
        assert accuracy.auc == pytest.approx(float(metadata["auc"]), abs=0.07)
    strong, weak = measured["strong"], measured["weak"]
    expected = float(shipped["strong"].metadata["step_accuracy"])
    assert strong.steps.accuracy == pytest.approx(expected, abs=0.03)
    assert expected > 0.95 and weak.steps is None
    assert weak.outcome.interval[1] < strong.outcome.interval[0]
    assert weak.auc < strong.auc - 0.1


def test_only_the_strong_gradient_finds_the_wrong_token(shipped):
    strong, weak = (localisation(shipped[s], responses=100, seed=7) for s in ("strong", "weak"))
    assert strong > 0.75 and abs(weak - 0.5) < 0.2
    assert strong > weak + 0.15


def test_a_countdown_model_reads_the_last_token():
    reward = load_reward_model(TINY_COUNTDOWN, replace(OUTCOMES, steps=2))
    assert (reward.pooling, reward.positions) == ("last", None)
    assert reward_recipe(TINY_COUNTDOWN, "strong").labels == "outcomes"
    assert reward_model_accuracy(reward, prompts=8, seed=0).steps is None


def test_the_threshold_is_where_most_agree():
    samples = reward_training.policy_samples(
        load_policy("chain-qwen3")[0], Chain(), 4, seed=0, held_out=False
    )
    verdicts = [replace(samples.verdicts[0], correct=right) for right in (False, True, False, True)]
    samples = replace(samples, verdicts=verdicts)
    find = reward_models._best_threshold
    assert find(torch.tensor([0.0, 1.0, 0.5, 2.0]), samples) == pytest.approx(0.75)
    assert find(torch.tensor([0.0, 1.0, 3.0, 2.0]), samples) == pytest.approx(0.5)
    verdicts = [replace(each, correct=True) for each in verdicts]
    assert find(torch.tensor([5.0, 1.0, 3.0, 2.0]), replace(samples, verdicts=verdicts)) < 1.0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda path: load_reward_model("chain-qwen3", "stong"), "did you mean"),
        (lambda path: load_reward_model("chain-qwen"), "no setting"),
        (lambda path: build_reward_model(TINY_COUNTDOWN, path, strength=STEPS), "task chain"),
        (
            lambda path: build_reward_model(TINY, path, strength=replace(STEPS, steps=0)),
            "steps=0",
        ),
        (
            lambda path: build_reward_model(TINY, path, strength=replace(OUTCOMES, samples=0)),
            "samples=0",
        ),
        (
            lambda path: build_reward_model(TINY, path, strength=replace(STEPS, noises=())),
            "noises is empty",
        ),
        (
            lambda path: build_reward_model(TINY, path, strength=replace(STEPS, extra_layers=0)),
            "extra_layers",
        ),
        (
            lambda path: build_reward_model(
                TINY, path, strength=replace(STEPS, interpolate_from=1.0)
            ),
            "interpolate_from=1.0",
        ),
        (
            lambda path: build_reward_model(TINY, path, strength=replace(STEPS, labels="x")),
            "labels='x'",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(fault, message, tmp_path):
    with pytest.raises(InputError, match=message):
        fault(tmp_path)


def test_bad_files_folders_and_counts_are_refused(tmp_path, cache, shipped):
    path = cache / f"tiny-reward-strong-{STEPS.fingerprint(TINY)}" / "model.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a model")
    with pytest.raises(InputError, match="delete the file to build it anew"):
        load_reward_model(TINY, STEPS)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="build_reward_model: cannot write"):
        build_reward_model(TINY, tmp_path / "file" / "folder", strength=STEPS)
    for measure in (
        lambda: reward_model_accuracy(shipped["weak"], prompts=0, seed=0),
        lambda: localisation(shipped["weak"], responses=0, seed=0),
    ):
        with pytest.raises(InputError, match="at least 1"):
            measure()
