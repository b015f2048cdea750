import random

import pytest

from tokencredit.errors import InputError
from tokencredit.lab import (
    Chain,
    Countdown,
    draw_prompts,
    is_held_out,
    prompt_dataset,
)


@pytest.mark.parametrize("task", [Chain(), Chain(steps=1), Countdown()], ids=str)
def test_the_splits_are_disjoint(task):
    train = set(prompt_dataset(task, 500, seed=0)["prompt"])
    held_out = set(prompt_dataset(task, 500, seed=0, held_out=True)["prompt"])
    assert train and held_out
    assert not train & held_out
    assert not any(is_held_out(text.split()) for text in train)
    assert all(is_held_out(text.split()) for text in held_out)


def test_about_one_prompt_in_eight_is_held_out():
    task, rng = Chain(), random.Random(0)
    share = sum(is_held_out(task.problem(rng)) for _ in range(4000)) / 4000
    assert abs(share - 1 / 8) < 0.02  # standard error 0.005


def test_the_seed_decides_the_prompts_and_a_longer_draw_begins_alike():
    task = Countdown()
    assert draw_prompts(task, 20, 0) == draw_prompts(task, 40, 0)[:20]
    assert draw_prompts(task, 20, 0) != draw_prompts(task, 20, 1)
    assert draw_prompts(task, 0, 0) == []


def test_a_data_set_holds_words_joined_by_spaces():
    data = prompt_dataset(Chain(), 3, seed=0)
    assert data.column_names == ["prompt"]
    assert [tuple(text.split()) for text in data["prompt"]] == draw_prompts(Chain(), 3, 0)


def test_a_split_without_prompts_is_refused():
    only = Countdown(numbers=2, low=1, high=1, operators="+")  # 1 1 -> 2 and nothing else
    missing = not is_held_out(["1", "1", "->", "2"])
    assert len(draw_prompts(only, 1, 0, held_out=not missing)) == 1
    with pytest.raises(InputError, match="make the task larger"):
        draw_prompts(only, 1, 0, held_out=missing)
