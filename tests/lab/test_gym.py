import importlib.util
import json

import pytest

from tokencredit.errors import InputError, MissingExtraError
from tokencredit.lab import gym_dataset, gym_reward

INSTALLED = importlib.util.find_spec("reasoning_gym") is not None
needs_gym = pytest.mark.skipif(not INSTALLED, reason="reasoning-gym is not installed")


@pytest.mark.skipif(INSTALLED, reason="reasoning-gym is installed")
def test_the_extra_is_named_when_missing():
    with pytest.raises(MissingExtraError, match=r"tokencredit\[reasoning-gym\]"):
        gym_dataset("chain_sum", 1, 0)


@needs_gym
@pytest.mark.parametrize(
    "name", ["chain_sum", "countdown", "gsm_symbolic", "number_sorting", "spell_backward"]
)
def test_its_own_answers_score_one_and_nonsense_less(name):
    data = gym_dataset(name, 4, seed=1)
    rows = json.loads(json.dumps(data.to_list()))
    entries = [row["gym_entry"] for row in rows]
    prompts = [row["prompt"] for row in rows]
    answers = [row["answer"] for row in rows]
    assert gym_reward(prompts, answers, gym_entry=entries, answer=answers) == [1.0] * 4
    tagged = [f"well <answer>no</answer> or <answer> {a} </answer> then" for a in answers]
    assert gym_reward(prompts, tagged, gym_entry=entries) == [1.0] * 4
    messages = [[{"role": "assistant", "content": answer}] for answer in answers]
    assert gym_reward(prompts, messages, gym_entry=entries) == [1.0] * 4
    assert all(score < 1.0 for score in gym_reward(prompts, ["zzz"] * 4, gym_entry=entries))


@needs_gym
def test_options_and_seeds_reach_the_gym():
    one, same, other = (
        gym_dataset("chain_sum", 3, seed, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
        for seed in (1, 1, 2)
    )
    assert one["prompt"] == same["prompt"] != other["prompt"]


@needs_gym
def test_what_the_gym_does_not_know_is_refused():
    with pytest.raises(InputError, match=r"did you mean 'chain_sum'\?"):
        gym_dataset("chain_sums", 1, 0)
    with pytest.raises(InputError, match="chain_sum refuses"):
        gym_dataset("chain_sum", 1, 0, nonsense=1)
