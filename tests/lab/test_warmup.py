from dataclasses import replace

import pytest

from tokencredit.errors import InputError
from tokencredit.lab import Chain, setting, warm_up

TINY = replace(
    setting("chain-llama"),
    task=Chain(steps=1, fillers=0),
    layers=1,
    width=16,
    heads=2,
    warmup_batch_size=4,
    warmup_steps=30,
)


def test_progress_is_told_with_the_accuracy_where_there_is_a_target():
    told = []
    warmed = warm_up(replace(TINY, target_accuracy=0.0), on_progress=lambda *a: told.append(a))
    assert warmed.steps == 25  # the first check reaches a target of nothing
    assert not warmed.model.training
    [(step, loss, accuracy)] = told
    assert step == 25 and loss > 0 and 0.0 <= accuracy <= 1.0


def test_without_a_target_all_steps_are_taken():
    told = []
    warmed = warm_up(replace(TINY, target_accuracy=None), on_progress=lambda *a: told.append(a))
    assert (warmed.steps, warmed.seed) == (30, 0)
    assert [(step, accuracy) for step, _, accuracy in told] == [(25, None), (30, None)]


def test_a_seed_that_fails_gives_way_to_the_next(monkeypatch):
    from tokencredit.lab import Evaluation, warmup

    answers = iter([0, 1, 0, 200])  # two checks an attempt, of 256
    monkeypatch.setattr(warmup, "evaluate", lambda *a, **k: Evaluation(next(answers), 256))
    warmed = warm_up(replace(TINY, target_accuracy=0.5, seed=7))
    assert (warmed.seed, warmed.steps) == (8, 30)


def test_the_attempts_are_bounded():
    with pytest.raises(InputError, match=r"seeds 0 to 3 did not reach target_accuracy=1\.0"):
        warm_up(replace(TINY, target_accuracy=1.0, warmup_steps=2))


def test_no_steps_are_refused():
    with pytest.raises(InputError, match="warmup_steps=0"):
        warm_up(replace(TINY, warmup_steps=0))
