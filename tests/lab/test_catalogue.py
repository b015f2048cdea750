from dataclasses import FrozenInstanceError, fields, replace

import pytest

from tokencredit.errors import InputError
from tokencredit.lab import Chain, setting, settings

CHANGES = {
    "task": Chain(steps=4),
    "family": "gpt2",
    "warmup_steps": 1,
    "target_accuracy": 0.1,
    "warmup_learning_rate": 1.0,
    "initializer_range": 0.1,
    "warmup_batch_size": 2,
    "seed": 7,
    "layers": 1,
    "width": 16,
    "heads": 2,
}
LATER = {"name", "prompts_per_step", "group_size", "learning_rate", "steps"}


def test_the_names():
    assert list(settings()) == [
        "chain-qwen3",
        "chain-llama",
        "countdown-qwen3",
        "countdown-llama",
        "chain-gpt2",
        "countdown-gpt2",
    ]
    assert all(each.name == name for name, each in settings().items())
    assert setting().name == "chain-qwen3"


def test_a_typo_gets_the_nearest_name():
    with pytest.raises(InputError, match=r"did you mean 'chain-qwen3'\?"):
        setting("chain-qwen")


def test_the_fingerprint_follows_everything_that_decides_the_weights():
    chain = setting()
    assert {field.name for field in fields(chain)} == set(CHANGES) | LATER
    for field, value in CHANGES.items():
        assert replace(chain, **{field: value}).fingerprint != chain.fingerprint
    assert replace(chain, name="x", steps=1, learning_rate=1.0).fingerprint == chain.fingerprint


def test_a_setting_is_frozen():
    with pytest.raises(FrozenInstanceError):
        setting().seed = 1
