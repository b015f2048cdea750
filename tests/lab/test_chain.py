import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokencredit.errors import InputError
from tokencredit.lab.tasks import Chain

PLAIN = Chain(steps=2, fillers=0)
PROMPT = ["6", "-", "4", "*", "7", "="]
RIGHT = "6 - 4 = 2 ; 2 * 7 = 4 ; ans 4 <eos>"  # 2 * 7 = 14, modulo 10


def verify(response, task=PLAIN, prompt=PROMPT):
    return task.verify(prompt, response.split())


def test_a_right_response():
    verdict = verify(RIGHT)
    assert verdict.correct
    assert verdict.first_wrong is None
    step = ("forced", "forced", "forced", "forced", "deciding", "forced")
    assert verdict.kinds == (*step, *step, "forced", "forced", "forced")


@pytest.mark.parametrize(
    ("response", "first_wrong"),
    [
        ("", 0),
        ("6 - 4 = 3 ; 3 * 7 = 1 ; ans 1 <eos>", 4),  # wrong result, carried on
        ("6 - 4 = 2 ; 2 * 7 = 5 ; ans 5 <eos>", 10),  # wrong second result
        ("6 - 4 = 2 ; 3 * 7 = 1 ; ans 1 <eos>", 6),  # wrong copy of the running value
        ("6 + 4 = 0 ; 0 * 7 = 0 ; ans 0 <eos>", 1),  # wrong operator
        ("6 - 4 = 2 ; 2 * 7 = 4 ; ans 5 <eos>", 13),  # wrong answer
        ("6 - 4 = 2 ; 2 * 7 = 4 ; ans 4", 13),  # cut off: the last token
        ("6 - 4 = 2", 4),  # cut off
        ("6", 0),
        ("<eos>", 0),
        ("ans ans ans", 0),
        (RIGHT + " <eos>", 15),  # goes on after the end
        (RIGHT + " so so", 15),
        ("<eos> " + RIGHT, 0),
    ],
)
def test_wrong_responses(response, first_wrong):
    verdict = verify(response)
    assert not verdict.correct
    assert verdict.first_wrong == first_wrong
    assert len(verdict.kinds) == len(response.split())


def test_luck_is_correct_but_its_wrong_token_is_named():
    # 3 * 0 = 0 whatever came before the zero.
    verdict = verify("1 + 1 = 3 ; 3 * 0 = 0 ; ans 0 <eos>", prompt=["1", "+", "1", "*", "0", "="])
    assert verdict.correct
    assert verdict.first_wrong == 4


def test_only_the_ending_counts():
    assert verify("so so ans 4 <eos>").correct
    assert verify("so so ans 4 <eos>").first_wrong == 0


def test_fillers_are_free_but_must_be_fillers():
    task = Chain(steps=1, fillers=2)
    prompt = ["6", "-", "4", "="]
    for word in ("so", "then"):
        verdict = verify(f"{word} 6 - 4 = 2 ; ans 2 <eos>", task, prompt)
        assert verdict.first_wrong is None
        assert verdict.kinds[0] == "filler"
        assert verdict.kinds[5] == "deciding"
    assert verify("next 6 - 4 = 2 ; ans 2 <eos>", task, prompt).first_wrong == 0
    assert verify("6 - 4 = 2 ; ans 2 <eos>", task, prompt).first_wrong == 0


tasks = st.builds(
    Chain,
    steps=st.integers(1, 4),
    modulus=st.integers(2, 12),
    operators=st.sampled_from(["+", "-*", "+-*"]),
    fillers=st.integers(0, 8),
)


@given(tasks, st.integers(0, 10**6), st.data())
def test_any_tokens_can_be_verified(task, seed, data):
    words = st.one_of(st.sampled_from(task.vocabulary), st.text(max_size=3))
    response = data.draw(st.lists(words, max_size=task.max_response + 5))
    verdict = task.verify(task.problem(random.Random(seed)), response)
    assert len(verdict.kinds) == len(response)
    assert verdict.first_wrong is None or 0 <= verdict.first_wrong <= max(0, len(response) - 1)
    if not verdict.correct:
        assert verdict.first_wrong is not None


@given(tasks, st.integers(0, 10**6))
def test_a_noise_free_demonstration_is_right(task, seed):
    rng = random.Random(seed)
    prompt = task.problem(rng)
    response = replace(task, noise=0.0).demonstration(prompt, rng)
    verdict = task.verify(prompt, response)
    assert verdict.correct
    assert verdict.first_wrong is None
    assert len(prompt) == task.prompt_length
    assert len(response) == task.max_response
    assert {*prompt, *response} <= set(task.vocabulary)


@given(tasks, st.integers(0, 10**6), st.data())
@settings(max_examples=50)
def test_a_single_corrupted_token_is_found(task, seed, data):
    rng = random.Random(seed)
    prompt = task.problem(rng)
    response = list(replace(task, noise=0.0).demonstration(prompt, rng))
    kinds = task.verify(prompt, response).kinds
    index = data.draw(st.sampled_from([i for i, k in enumerate(kinds) if k != "filler"]))
    other = data.draw(st.sampled_from([w for w in task.vocabulary if w != response[index]]))
    response[index] = other
    assert task.verify(prompt, response).first_wrong == index


def test_noise_makes_demonstrations_err_about_as_often_as_it_says():
    task, rng = Chain(steps=1, noise=0.5), random.Random(0)
    prompts = [task.problem(rng) for _ in range(2000)]
    wrong = sum(not task.verify(p, task.demonstration(p, rng)).correct for p in prompts)
    # A redrawn digit is right one time in ten: 0.5 * 0.9, standard error 0.011.
    assert abs(wrong / 2000 - 0.45) < 0.05


@pytest.mark.parametrize(
    "prompt", ["", "6 - 4 =", "6 - 4 * 7", "6 - 4 * x =", "6 - 4 / 7 =", "06 - 4 * 7 ="]
)
def test_a_malformed_prompt_is_refused(prompt):
    with pytest.raises(InputError, match=r"^chain: .*give words such as") as caught:
        verify(RIGHT, prompt=prompt.split())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 0},
        {"modulus": 1},
        {"operators": ""},
        {"operators": "++"},
        {"operators": "/"},
        {"fillers": 9},
        {"noise": 1.5},
    ],
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(InputError, match=f"^Chain: {next(iter(options))}="):
        Chain(**options)
