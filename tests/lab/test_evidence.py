"""The measurements themselves: on batches where the answer is known by construction."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tokencredit import GRPO
from tokencredit.cli.main import main
from tokencredit.lab import load_policy, load_reward_model, setting
from tokencredit.lab.credits import Oracle
from tokencredit.lab.evidence import (
    LEARNING_RATES,
    Interval,
    Table,
    _measure,
    agreement,
    first_wrong_found,
    gain_after_one_update,
    misaligned,
    sample_batch,
)

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def chain():
    made = setting("chain-qwen3")
    policy, _ = load_policy(made)
    source = load_reward_model(made, "strong").source()
    batch = sample_batch(policy, made.task, source, prompts=6, group_size=8, seed=0)
    return policy, made.task, source, batch


def with_signals(batch, **signals):
    r = batch.rollouts
    rollouts = r.replace(signals={**r.signals, **signals})
    return dataclasses.replace(batch, rollouts=rollouts)


def cells(table):
    return {label: [float(c.split()[0]) for c in row] for label, row in table.rows}


def test_interval():
    # mean 2, variance 2, n 2: half = 1.96 * sqrt(2 / 2)
    i = Interval.of([1.0, 3.0])
    assert (i.mean, i.low, i.high) == pytest.approx((2.0, 2 - 1.96, 2 + 1.96))
    assert math.isnan(Interval.of([]).mean)
    assert str(Interval.of([0.5, 0.5])) == "+0.500 [+0.500, +0.500]"


def test_table():
    table = Table("title", ("one", "two"), (("|a|", ("1", "2")),), "note")
    assert table.text().splitlines() == ["title", "       one  two", "  |a|  1    2", "  note"]
    assert "| \\|a\\| | 1 | 2 |" in table.markdown()


def test_a_batch_is_whole(chain):
    _, task, _, batch = chain
    r = batch.rollouts
    assert r.responses == 48 and r.groups == 6
    assert {"work", "entropy", "logprob", "oracle", "eos", "work_random"} <= set(r.signals)
    assert [v.correct for v in batch.verdicts] == r.success.tolist()
    for i, response in enumerate(batch.responses):
        assert int(r.mask[i].sum()) == len(response)
        words = [task.vocabulary[t] for t in response]
        assert task.verify(batch.prompts[i], words) == batch.verdicts[i]


def test_a_perfect_and_a_blind_score(chain):
    policy, task, source, batch = chain
    mark = torch.zeros(batch.rollouts.mask.shape)
    for i, verdict in enumerate(batch.verdicts):
        if verdict.first_wrong is not None:
            mark[i, verdict.first_wrong] = 1.0
    known = with_signals(batch, work=-mark, entropy=mark, natural=mark, cosine=0 * mark)
    found = cells(first_wrong_found(policy, task, source, known, swaps=2))
    assert found["-work"] == [1.0, 1.0]
    assert found["entropy"] == [1.0, 1.0]
    assert found["-natural"] == [0.0, 0.0]
    assert found["-cosine"] == [0.5, 0.0]  # ties count half
    assert 0.2 < found["random"][0] < 0.8


def test_the_exact_swap_finds_what_the_strong_reward_model_sees(chain):
    policy, task, source, batch = chain
    found = cells(first_wrong_found(policy, task, source, batch, swaps=8))
    assert found["exact swap (8 responses)"][0] > 0.8
    assert found["-work"][0] > 0.6


def test_misaligned_shares_by_construction(chain):
    _, task, _, batch = chain
    r = batch.rollouts
    sign = torch.where(r.success, 1.0, -1.0).unsqueeze(1).expand(r.mask.shape)
    deciding = torch.zeros(r.mask.shape)
    for i, verdict in enumerate(batch.verdicts):
        deciding[i, : len(verdict.kinds)] = torch.tensor(
            [float(k == "deciding") for k in verdict.kinds]
        )
    # Against the reward exactly at deciding tokens.
    known = with_signals(batch, work=sign * (1 - 2 * deciding))
    shares = cells(misaligned(task, known))
    assert shares["deciding tokens"][0] == 1.0
    assert shares["forced tokens"][0] == 0.0 and shares["filler tokens"][0] == 0.0
    assert 0 < shares["all tokens"][0] < 0.3


def test_agreement_of_the_oracle_is_positive_and_of_grpo_zero(chain):
    policy, task, _, batch = chain
    table = agreement(policy, task, batch, (GRPO(), Oracle()), responses=4, continuations=6)
    found = cells(table)
    assert found["grpo"][0] == 0.0
    assert found["oracle"][0] > 0.05


def test_gain_after_one_update(chain):
    policy, task, source, _ = chain
    before = {k: v.clone() for k, v in policy.state_dict().items()}
    table = gain_after_one_update(policy, task, source, runs=2, prompts=4)
    found = cells(table)
    assert found["grpo"][0] == pytest.approx(1.0)
    assert found["datc"][0] > 1.0 > found["datc_flipped"][0]
    assert all(torch.equal(before[k], v) for k, v in policy.state_dict().items())


class EverySecond:
    """Has no score for every second response."""

    def __init__(self, source):
        self.embed, self.whole = source.embed, source.score

    def score(self, *arguments):
        score = self.whole(*arguments)
        return torch.where(torch.arange(len(score)) % 2 == 0, score, torch.nan)


def test_responses_without_a_score_are_left_out_of_its_mean(chain):
    policy, task, source, batch = chain
    whole = _measure(policy, task, source, batch, 3)
    half = _measure(policy, task, EverySecond(source), batch, 3)
    assert math.isfinite(half[0]) and half[0] != whole[0] and half[1] == whole[1]


def test_the_command_shows_and_writes_every_table(tmp_path, capsys):
    out = tmp_path / "evidence.md"
    assert main(["lab", "evidence", "--size", "0.01", "--reward", "weak", "-o", str(out)]) == 0
    assert "(d) share of tokens" in capsys.readouterr().out
    assert out.read_text().count("**(") == 6
    for rate in LEARNING_RATES:
        assert f"a step of {rate}" in out.read_text()
    assert main(["lab", "evidence", "--size", "0"]) == 2
    assert main(["lab", "evidence", "no-such"]) == 2
