import random

import pytest
from transformers import AutoTokenizer

from tokencredit.lab import Chain, Countdown, tokenizer_for

TASKS = [Chain(), Chain(steps=20, fillers=0), Countdown(fillers=2)]


@pytest.mark.parametrize("task", TASKS, ids=str)
@pytest.mark.parametrize("saved", [False, True])
def test_round_trips(task, saved, tmp_path):
    tokenizer = tokenizer_for(task)
    if saved:
        tokenizer.save_pretrained(tmp_path)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    rng = random.Random(0)
    prompt = task.problem(rng)
    words = [*prompt, *task.demonstration(prompt, rng)]
    text = " ".join(words)
    ids = tokenizer(text)["input_ids"]
    assert ids == [task.vocabulary.index(word) for word in words]
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(ids) == words
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.removesuffix(" <eos>")


@pytest.mark.parametrize("saved", [False, True])
def test_special_tokens_padding_and_limits(saved, tmp_path):
    tokenizer = tokenizer_for(Chain())
    if saved:
        tokenizer.save_pretrained(tmp_path)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert tokenizer.model_max_length == 128
    assert len(tokenizer) == len(Chain().vocabulary)
    batch = tokenizer(["6 - 4", "6"], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch["input_ids"][1][:2] == [0, 0]
    assert batch["attention_mask"] == [[1, 1, 1], [0, 0, 1]]


def test_every_word_of_the_vocabulary_survives_and_others_become_unk():
    task = Countdown(fillers=8)
    tokenizer = tokenizer_for(task)
    for index, word in enumerate(task.vocabulary):
        assert tokenizer(word)["input_ids"] == [index]
        assert tokenizer.decode([index]) == word
    assert tokenizer("  zebra\t6\n")["input_ids"] == [2, task.vocabulary.index("6")]
