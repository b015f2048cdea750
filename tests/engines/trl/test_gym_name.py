"""Tasks of reasoning-gym by name: ``dataset_name: reasoning-gym:NAME``."""

from types import SimpleNamespace

import pytest
from datasets import Dataset

from tokencredit import MissingExtraError, lab
from tokencredit.engines.trl.data import _reward, load_splits


def script(name):
    return SimpleNamespace(
        dataset_name=name, dataset_config=None, dataset_streaming=False,
        dataset_train_split="train", dataset_test_split="test",
    )  # fmt: skip


def test_by_name(monkeypatch):
    asked = []

    def made(name, n, seed, **options):
        asked.append((name, n, seed))
        return Dataset.from_list([{"prompt": f"{name} {seed}", "gym_entry": "{}"}])

    monkeypatch.setattr(lab, "gym_dataset", made, raising=False)
    none = SimpleNamespace(datasets=[])
    train, test = load_splits(script("reasoning-gym:chain_sum"), none, evaluate=True)
    assert train[0]["prompt"] == "chain_sum 0" and test[0]["prompt"] == "chain_sum 1"
    assert [a[0] for a in asked] == ["chain_sum", "chain_sum"]
    assert _reward("tokencredit.lab.gym_reward").__name__ == "gym_reward"


def test_without_the_package_the_extra_is_named():
    try:
        import reasoning_gym  # noqa: F401
    except ImportError:
        with pytest.raises(MissingExtraError, match="reasoning-gym"):
            load_splits(
                script("reasoning-gym:chain_sum"), SimpleNamespace(datasets=[]), evaluate=False
            )
    else:
        pytest.skip("reasoning-gym is installed here")
