import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokencredit.errors import InputError
from tokencredit.lab.tasks import Countdown

TASK = Countdown()
PROMPT = ["3", "2", "5", "->", "6"]
RIGHT = "3 + 5 = 8 ; 8 - 2 = 6 ; <eos>"


def verify(response, task=TASK, prompt=PROMPT):
    return task.verify(prompt, response.split())


@pytest.mark.parametrize("response", [RIGHT, "5 - 2 = 3 ; 3 + 3 = 6 ; <eos>"])
def test_right_responses(response):
    verdict = verify(response)
    assert verdict.correct
    assert verdict.first_wrong is None
    step = ("deciding", "deciding", "deciding", "forced", "forced", "forced")
    assert verdict.kinds == (*step, *step, "forced")


@pytest.mark.parametrize(
    ("response", "first_wrong"),
    [
        ("", 0),
        ("4 + 5 = 9 ; 9 - 2 = 7 ; <eos>", 0),  # a number that was not given
        ("3 * 5 = 15 ; 15 - 2 = 13 ; <eos>", 1),  # from 15 and 2 nothing makes 6
        ("3 + 3 = 6 ; 6 - 2 = 4 ; <eos>", 2),  # a number used twice
        ("3 + 5 : 8 ; 8 - 2 = 6 ; <eos>", 3),  # format
        ("3 + 5 = 7 ; 7 - 2 = 5 ; <eos>", 4),  # arithmetic
        ("3 + 5 = 8 , 8 - 2 = 6 ; <eos>", 5),  # format
        ("3 + 5 = 8 ; 8 + 2 = 10 ; <eos>", 7),  # wrong operator in the last step
        ("3 + 5 = 8 ; 8 - 2 = 7 ; <eos>", 10),  # arithmetic in the last step
        ("3 + 5 = 8 ; 2 - 8 = 6 ; <eos>", 6),  # only 8 - 2 makes 6
        ("3 + 5 = 8 ; 8 - 2 = 6 ;", 11),  # cut off
        ("3 + 5", 2),  # cut off
        ("3 + 5 = 8 ; <eos>", 6),  # stops with a number unused
        ("<eos>", 0),
        (RIGHT + " <eos>", 13),
        (RIGHT + " so so so so so so", 13),
        ("3 + 5 = ² ; 8 - 2 = 6 ; <eos>", 4),  # str.isdigit would let this through
    ],
)
def test_wrong_responses(response, first_wrong):
    verdict = verify(response)
    assert not verdict.correct
    assert verdict.first_wrong == first_wrong
    assert len(verdict.kinds) == len(response.split())


def test_the_choice_that_loses_the_target_is_blamed_down_to_the_word():
    # 9 8 1 -> 2: by 9 - 8 = 1, 1 + 1; by 9 + 1 = 10, 10 - 8; by 8 - 1 = 7, 9 - 7; no others
    # without a negative on the way, but for the order of a sum.
    prompt = ["9", "8", "1", "->", "2"]
    assert verify("9 * 1 = 9 ; 9 - 8 = 1 ; <eos>", prompt=prompt).first_wrong == 1
    assert verify("9 + 8 = 17 ; 17 - 1 = 16 ; <eos>", prompt=prompt).first_wrong == 2
    assert verify("8 - 1 = 7 ; 9 - 7 = 2 ; <eos>", prompt=prompt).correct


def test_an_unsolvable_prompt_blames_the_first_choice_and_has_no_demonstration():
    prompt = ["1", "1", "1", "->", "50"]
    assert verify("1 + 1 = 2 ; 2 + 1 = 3 ; <eos>", prompt=prompt).first_wrong == 0
    with pytest.raises(InputError, match="cannot be solved"):
        Countdown(hit_share=1.0).demonstration(prompt, random.Random(0))


def test_fillers():
    task = Countdown(numbers=2, fillers=1)
    prompt = ["3", "2", "->", "6"]
    verdict = verify("so 3 * 2 = 6 ; <eos>", task, prompt)
    assert verdict.correct
    assert verdict.kinds == (
        *("filler", "deciding", "deciding", "deciding", "forced", "forced", "forced"),
        "forced",
    )
    assert verify("then 3 * 2 = 6 ; <eos>", task, prompt).first_wrong == 0
    assert verify("so 3 + 2 = 5 ; <eos>", task, prompt).first_wrong == 2


tasks = st.builds(
    Countdown,
    numbers=st.integers(2, 4),
    high=st.integers(1, 12),
    operators=st.sampled_from(["+-", "-*", "+-*"]),
    maximum=st.integers(20, 60),
    fillers=st.integers(0, 8),
)


@given(tasks, st.integers(0, 10**6), st.data())
def test_any_tokens_can_be_verified(task, seed, data):
    words = st.one_of(st.sampled_from(task.vocabulary), st.text(max_size=3))
    response = data.draw(st.lists(words, max_size=task.max_response + 5))
    verdict = task.verify(task.problem(random.Random(seed)), response)
    assert len(verdict.kinds) == len(response)
    assert verdict.first_wrong is None or 0 <= verdict.first_wrong <= max(0, len(response) - 1)
    assert verdict.correct == (verdict.first_wrong is None)


@given(tasks, st.integers(0, 10**6))
def test_a_demonstration_that_hits_is_right(task, seed):
    rng = random.Random(seed)
    prompt = task.problem(rng)
    response = replace(task, hit_share=1.0).demonstration(prompt, rng)
    assert task.verify(prompt, response).correct
    assert len(prompt) == task.prompt_length
    assert len(response) == task.max_response
    assert {*prompt, *response} <= set(task.vocabulary)


@given(tasks, st.integers(0, 10**6), st.data())
@settings(max_examples=50)
def test_a_corrupted_forced_token_is_found(task, seed, data):
    rng = random.Random(seed)
    prompt = task.problem(rng)
    response = list(replace(task, hit_share=1.0).demonstration(prompt, rng))
    kinds = task.verify(prompt, response).kinds
    index = data.draw(st.sampled_from([i for i, k in enumerate(kinds) if k == "forced"]))
    response[index] = data.draw(
        st.sampled_from([w for w in task.vocabulary if w != response[index]])
    )
    assert task.verify(prompt, response).first_wrong == index


@given(st.integers(0, 10**6))
def test_the_blamed_prefix_is_lost_and_the_one_before_it_is_not(seed):
    # Held against a search over whole responses that knows nothing of prefixes.
    task, rng = Countdown(hit_share=0.0), random.Random(seed)
    prompt = task.problem(rng)
    response = task.demonstration(prompt, rng)
    first_wrong = task.verify(prompt, response).first_wrong
    solutions = all_solutions(prompt)
    assert solutions
    if first_wrong is None:
        assert response in solutions
    else:
        assert any(s[:first_wrong] == response[:first_wrong] for s in solutions)
        assert not any(s[: first_wrong + 1] == response[: first_wrong + 1] for s in solutions)


def all_solutions(prompt):
    numbers, target = [int(word) for word in prompt[:3]], int(prompt[4])
    operations = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    found = set()
    for i, j, k in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
        for one in "+-*":
            x = operations[one](numbers[i], numbers[j])
            for two in "+-*":
                for a, b in ((x, numbers[k]), (numbers[k], x)):
                    y = operations[two](a, b)
                    if 0 <= x <= 50 and y == target:
                        text = (
                            f"{numbers[i]} {one} {numbers[j]} = {x} ; {a} {two} {b} = {y} ; <eos>"
                        )
                        found.add(tuple(text.split()))
    return found


def test_about_half_of_the_demonstrations_hit_and_all_are_legal():
    rng = random.Random(0)
    prompts = [TASK.problem(rng) for _ in range(1000)]
    hits = sum(TASK.verify(p, TASK.demonstration(p, rng)).correct for p in prompts)
    assert 0.5 < hits / 1000 < 0.65  # some aimless ones hit by chance


def test_a_task_without_prompts_says_so():
    with pytest.raises(InputError, match="no solvable prompt; raise maximum"):
        Countdown(low=50, high=50, operators="+").problem(random.Random(0))


@pytest.mark.parametrize("prompt", ["", "3 2 5 6 6", "3 2 -> 6", "3 2 x -> 6", "3 2 5 -> 51"])
def test_a_malformed_prompt_is_refused(prompt):
    with pytest.raises(InputError, match=r"^countdown: .*give words such as"):
        verify(RIGHT, prompt=prompt.split())


@pytest.mark.parametrize(
    "options",
    [
        {"numbers": 1},
        {"low": -1},
        {"high": 0},
        {"high": 51},
        {"operators": "x"},
        {"fillers": -1},
        {"hit_share": -0.1},
    ],
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(InputError, match=f"^Countdown: {next(iter(options))}="):
        Countdown(**options)
