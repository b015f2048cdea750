import pytest

from tokencredit.errors import InputError
from tokencredit.lab import Chain, Countdown, oracle_signal, task_reward

TASK = Chain(steps=1, fillers=0)
PROMPTS = ["6 - 4 =", "6 - 4 =", "6 - 4 =", "6 - 4 ="]
RESPONSES = [
    "6 - 4 = 2 ; ans 2 <eos>",
    "6 - 4 = 3 ; ans 3 <eos>",
    "6 - 4 = 2 ; ans 2",
    "",
]


def ids(text, task=TASK):
    return [task.vocabulary.index(word) for word in text.split()]


def test_the_reward_reads_ids_not_text():
    reward = task_reward(TASK)
    given = [ids(text) for text in RESPONSES]
    scores = reward(
        prompts=PROMPTS, completions=["nonsense"] * 4, completion_ids=given, trainer_state=None
    )
    assert scores == [1.0, 0.0, 0.0, 0.0]
    assert reward.__name__ == "chain_accuracy"
    assert task_reward(Countdown()).__name__ == "countdown_accuracy"


def test_an_id_outside_the_vocabulary_is_a_wrong_token():
    assert oracle_signal(TASK)(["6 - 4 ="], [[10_000, -1]]) == [[1.0, 0.0]]


def test_the_oracle_marks_every_token_of_every_response():
    marks = oracle_signal(TASK)(PROMPTS, [ids(text) for text in RESPONSES])
    assert [len(row) for row in marks] == [len(text.split()) for text in RESPONSES]
    assert [[i for i, mark in enumerate(row) if mark] for row in marks] == [[4], [4], [7], []]


def test_what_does_not_fit_is_refused():
    with pytest.raises(InputError, match="2 prompts but 1 completion_ids"):
        task_reward(TASK)(PROMPTS[:2], ["", ""], [[]])
    with pytest.raises(InputError, match="plain text, not messages"):
        task_reward(TASK)([[{"role": "user", "content": "6 - 4 ="}]], [""], [[]])
