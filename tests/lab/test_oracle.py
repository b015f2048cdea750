from tokencredit.lab.tasks import Chain, Countdown, Task, Verdict, oracle_marks


def marks(task: Task, prompt: str, response: str) -> list[float]:
    return oracle_marks(task.verify(prompt.split(), response.split()))


def test_an_empty_response_has_no_marks():
    assert oracle_marks(Verdict(False, 0, ())) == []


def test_a_wrong_response_is_blamed_on_its_first_wrong_token_alone():
    given = marks(Countdown(), "3 2 5 -> 6", "3 * 5 = 15 ; 15 - 2 = 13 ; <eos>")
    assert given == [0.0, 1.0, *[0.0] * 11]


def test_a_right_response_is_owed_to_its_deciding_tokens():
    given = marks(Chain(steps=1, fillers=1), "6 - 4 =", "so 6 - 4 = 2 ; ans 2 <eos>")
    assert given == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0]


def test_luck_counts_as_right():
    task = Chain(steps=2, fillers=0)
    given = marks(task, "1 + 1 * 0 =", "1 + 1 = 3 ; 3 * 0 = 0 ; ans 0 <eos>")
    assert [index for index, mark in enumerate(given) if mark] == [4, 10]
