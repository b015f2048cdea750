import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokencredit.errors import InputError
from tokencredit.lab import (
    Chain,
    build_policy,
    cache_folder,
    evaluate,
    load_policy,
    policy_metadata,
    setting,
    store,
    tokenizer_for,
)

TINY = replace(
    setting("chain-llama"),
    name="tiny",
    task=Chain(steps=1, fillers=0),
    layers=1,
    width=16,
    heads=2,
    warmup_batch_size=4,
    warmup_steps=3,
    target_accuracy=None,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENCREDIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def same_weights(one: Path, other: Path) -> bool:
    a, b = load_file(one), load_file(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_seed_rebuilds_the_same_weights(tmp_path):
    one, same, other = (
        build_policy(TINY, tmp_path / str(i), seed=seed) for i, seed in enumerate((0, 0, 1))
    )
    assert same_weights(one, same)
    assert not same_weights(one, other)


def test_a_build_says_how_it_came_about(tmp_path):
    assert policy_metadata(TINY) is None
    load_policy(TINY)
    metadata = policy_metadata(TINY)
    assert set(metadata) == {"setting", "fingerprint", "seed", "steps", "accuracy", "version"}
    assert (metadata["setting"], metadata["seed"], metadata["steps"]) == ("tiny", "0", "3")
    assert 0.0 <= float(metadata["accuracy"]) <= 1.0


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_what_is_built_is_loaded(family, cache):
    variant = replace(TINY, family=family)
    told = []
    built, _ = load_policy(variant, on_progress=lambda *a: told.append(a))
    [path] = cache.rglob("*.safetensors")
    stored = load_file(path)
    assert told and all(tensor.dtype == torch.float16 for tensor in stored.values())
    told.clear()
    model, tokenizer = load_policy(variant, on_progress=lambda *a: told.append(a))
    assert told == []  # no second build
    assert model is not built and model.dtype == torch.float32 and not model.training
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert len(stored) == len(model.state_dict()) - 1  # the tied head is stored once
    for name, tensor in stored.items():
        assert torch.equal(model.state_dict()[name], tensor.float())
    assert len(tokenizer) == model.config.vocab_size


def test_a_variant_of_the_same_name_gets_its_own_policy(cache):
    load_policy(TINY)
    load_policy(replace(TINY, seed=1))
    assert len(list(cache.rglob("*.safetensors"))) == 2


def test_a_file_of_another_seed_is_not_taken_for_the_settings_own(cache):
    path = build_policy(TINY, cache / f"tiny-{TINY.fingerprint}", seed=1)
    assert policy_metadata(TINY) is None
    load_policy(TINY)
    assert policy_metadata(TINY)["seed"] == "0"
    assert list(cache.rglob("*.safetensors")) == [path]


@pytest.mark.parametrize("fault", [OSError("disk full"), KeyboardInterrupt()])
def test_a_build_that_dies_leaves_nothing_behind(cache, monkeypatch, fault):
    def half(tensors, name, metadata):
        Path(name).write_bytes(b"half a fi")
        raise fault

    monkeypatch.setattr(store, "save_file", half)
    with pytest.raises(type(fault)):
        load_policy(TINY)
    assert [path for path in cache.rglob("*") if path.is_file()] == []
    assert policy_metadata(TINY) is None


def test_two_builds_at_once_do_not_disturb_each_other(cache):
    failures = []

    def build():
        try:
            load_policy(TINY)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len([path for path in cache.rglob("*") if path.is_file()]) == 1
    load_policy(TINY)


def test_a_damaged_file_is_refused_by_name(cache):
    path = cache / f"tiny-{TINY.fingerprint}" / "model.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a policy")
    with pytest.raises(InputError, match="delete the file to build it anew") as caught:
        load_policy(TINY)
    assert str(path) in str(caught.value)
    save_file({"x": torch.zeros(1)}, path, metadata={"fingerprint": TINY.fingerprint})
    with pytest.raises(InputError, match="its tensors are not those of the model"):
        load_policy(TINY)


def test_an_unwritable_folder_is_refused_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="set TOKENCREDIT_CACHE"):
        build_policy(TINY, tmp_path / "file" / "folder")


def test_where_the_cache_is(monkeypatch):
    assert cache_folder().name == "cache"
    monkeypatch.delenv("TOKENCREDIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder() == Path("/elsewhere/tokencredit")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/someone"))
    assert cache_folder() == Path("/home/someone/.cache/tokencredit")


def test_the_shipped_policy_is_the_default_settings_own(cache):
    metadata = policy_metadata("chain-qwen3")
    assert metadata["setting"] == "chain-qwen3"
    assert metadata["fingerprint"] == setting().fingerprint
    assert metadata["seed"] == "0"
    assert 0.45 <= float(metadata["accuracy"]) <= 0.6
    model, tokenizer = load_policy("chain-qwen3")
    assert not cache.exists()  # nothing was built
    task = setting().task
    # Another seed than the one in the metadata; standard error 0.016.
    sampled = evaluate(model, tokenizer, task, seed=1).accuracy
    assert 0.42 <= sampled <= 0.6
    greedy = evaluate(model, tokenizer_for(task), task, seed=1, prompts=256, greedy=True).accuracy
    assert greedy > sampled + 0.2  # it knows the arithmetic and samples slips
