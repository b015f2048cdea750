"""Files that the trainer wrote are clean; each fault planted in one is found, and nothing else.

`golden/` holds the first groups of `tokencredit train --lab --max_steps 2 --record_every 1` for
each method: 8 responses a group, 12 groups of two steps.
"""

from __future__ import annotations

import copy
import gzip
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokencredit.cli.main import main
from tokencredit.doctor import Diagnosis, diagnose
from tokencredit.records import CreditRecord, Record, RecordWriter, assign_file

GOLDEN = Path(__file__).parent / "golden"
METHODS = ("gtpo", "grpo_s", "dapo", "datc", "grpo")
Lines = list[dict[str, Any]]
PAD = {"tokens": "<pad>", "token_ids": 0, "mask": 0}


def golden(method: str) -> Lines:
    with gzip.open(GOLDEN / f"{method}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write(folder: Path, lines: Lines) -> Path:
    path = folder / "rollouts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def diagnosed(folder: Path, method: str, lines: Lines, *, again: bool, **options: Any) -> Diagnosis:
    """The diagnosis of the lines, with the credit assigned again if `again`."""
    path = write(folder, lines)
    if again:
        about = lines[0]["meta"]["credit"][method]["options"]
        assign_file(path, path, method, options=about, overwrite=True)
    return diagnose(path, **options)


def arrays(line: dict[str, Any]) -> list[tuple[str, list[Any]]]:
    """Everything that has one value a token."""
    found = [(name, line[name]) for name in ("tokens", "token_ids", "mask")]
    found += list(line["signals"].items()) if "signals" in line else []
    for entry in line["credit"].values():
        found += [(name, values) for name, values in entry.items() if isinstance(values, list)]
    return found


def pad(line: dict[str, Any], at: int, **values: Any) -> None:
    """Put in one token that the policy did not choose."""
    for name, row in arrays(line):
        fill = {**PAD, "advantage": 0.0, **values}.get(name, values.get("signal"))
        row.insert(len(row) if at < 0 else at, fill)


# -- clean files ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_what_the_trainer_wrote_is_clean(method: str, tmp_path: Path) -> None:
    diagnosis = diagnose(GOLDEN / f"{method}.jsonl.gz")
    assert diagnosis.findings == (), str(diagnosis)
    assert (diagnosis.responses, diagnosis.groups) == (96, 12)
    again = diagnosed(tmp_path, method, golden(method), again=True)
    assert again.findings == (), str(again)


def clean_padding(lines: Lines) -> None:
    for k, line in enumerate(lines):
        for _ in range(k % 4):
            pad(line, -1)


def clean_left_padding(lines: Lines) -> None:
    for k, line in enumerate(lines):
        for _ in range(k % 4):
            pad(line, 0)


def clean_padding_filled_with_zeros(lines: Lines) -> None:
    for k, line in enumerate(lines):
        for _ in range(k % 4):
            pad(line, -1, signal=0.0)


def clean_end_token_pads(lines: Lines) -> None:
    for k, line in enumerate(lines):
        for _ in range(k % 4):
            pad(line, -1, tokens="<eos>", token_ids=1)


def clean_prompt_inside(lines: Lines) -> None:
    for line in lines:
        for token in reversed(line["prompt_token_ids"]):
            pad(line, 0, tokens="p", token_ids=token)


def clean_padding_token_sampled(lines: Lines) -> None:
    lines[4]["tokens"][3], lines[4]["token_ids"][3] = PAD["tokens"], PAD["token_ids"]


def clean_tool_output(lines: Lines) -> None:
    for line in lines:
        for _ in range(3):
            pad(line, 4, tokens="tool", token_ids=9, signal=0.5)


def clean_without_texts(lines: Lines) -> None:
    for line in lines:
        del line["tokens"], line["prompt"]
        line["tokens"] = []


def clean_unscored(lines: Lines) -> None:
    lines[3].update(reward=None, success=False, rewards={"chain_accuracy": None})


def clean_shaped_reward(lines: Lines) -> None:
    """A length penalty turns the order of rewards, not that of the reward that success is from."""
    for k, line in enumerate(lines):
        line["reward"] -= 1.5 * (k % 3)


def clean_small_rewards(lines: Lines) -> None:
    for line in lines:
        line["reward"] *= 0.3
        line["rewards"] = {}


def clean_credit_of_two_methods(lines: Lines) -> None:
    for line in lines:
        line["credit"]["mine"] = {"advantage": [0.3] * len(line["mask"])}


CLEAN = [value for name, value in globals().items() if name.startswith("clean_")]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("change", CLEAN, ids=lambda f: f.__name__.removeprefix("clean_"))
def test_no_false_alarm(method: str, change: Callable[[Lines], None], tmp_path: Path) -> None:
    lines = golden(method)
    change(lines)
    for line in lines:
        if not line["tokens"]:
            del line["tokens"]
    diagnosis = diagnosed(tmp_path, method, lines, again=True)
    assert diagnosis.clean, str(diagnosis)
    if change is not clean_credit_of_two_methods:
        assert diagnosis.notes == (), str(diagnosis)


def test_a_reward_that_did_not_score(tmp_path: Path) -> None:
    """The trainer leaves out a response whose verdict did not come; nothing else tells."""
    lines = [line for line in golden("gtpo") if line["group"] == "0.0"]
    kept = copy.deepcopy(lines)
    del kept[2]
    path = write(tmp_path, kept)
    assign_file(path, path, "gtpo", overwrite=True)
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    gone = {**lines[2], "success": False, "rewards": {"chain_accuracy": None}}
    entry = gone["credit"]["gtpo"]
    entry.update(base=0.0, advantage=[0.0] * len(gone["mask"]), reward=[0.0] * len(gone["mask"]))
    lines = [*kept[:2], gone, *kept[2:]]
    for line in lines:
        line["rewards"]["other"] = 0.5
    assert diagnose(write(tmp_path, lines)).clean


# -- planted faults -------------------------------------------------------------------------


def mask_late(lines: Lines) -> None:
    for line in lines:
        line["mask"][0] = 0


def mask_late_once(lines: Lines) -> None:
    lines[20]["mask"][0] = 0


def mask_early(lines: Lines) -> None:
    for line in lines:
        line["mask"][-1] = 0


def mask_shifted_into_padding(lines: Lines) -> None:
    for line in lines:
        pad(line, -1, mask=1)
        line["mask"][0] = 0
        pad(line, -1)


def mask_marks_padding(lines: Lines) -> None:
    pad(lines[5], -1, mask=1)


def mask_marks_an_end_token_that_pads(lines: Lines) -> None:
    for line in lines:
        pad(line, -1, tokens="<eos>", token_ids=1, mask=1)
        pad(line, -1, tokens="<eos>", token_ids=1)


def mask_marks_left_padding(lines: Lines) -> None:
    for line in lines:
        pad(line, 0, mask=1)
        pad(line, 0)


def mask_marks_the_prompt(lines: Lines) -> None:
    clean_prompt_inside(lines)
    for line in lines:
        line["mask"][len(line["prompt_token_ids"]) - 1] = 1


def mask_misses_after_the_prompt(lines: Lines) -> None:
    clean_prompt_inside(lines)
    for line in lines:
        line["mask"][len(line["prompt_token_ids"])] = 0


def mask_unknown_edge(lines: Lines) -> None:
    for line in lines:
        for values in line["signals"].values():
            values[0] = None


def mask_filler_edge(lines: Lines) -> None:
    for line in lines:
        for values in line["signals"].values():
            values[0] = 0.0


def entropy_negative(lines: Lines) -> None:
    lines[9]["signals"]["entropy"][2] = -0.25


def entropy_large(lines: Lines) -> None:
    lines[9]["signals"]["entropy"][2] = 14.0


def entropy_above_log_v(lines: Lines) -> None:
    lines[9]["signals"]["entropy"][2] = 3.5  # log 30 = 3.40


def logprob_positive(lines: Lines) -> None:
    for line in lines:
        line["signals"]["logprob"] = [-v for v in line["signals"]["logprob"]]


def temperature_high(lines: Lines) -> None:
    for line in lines:
        line["signals"]["entropy"] = [min(1.5 * v, 3.0) for v in line["signals"]["entropy"]]


def temperature_low(lines: Lines) -> None:
    for line in lines:
        line["signals"]["entropy"] = [0.6 * v for v in line["signals"]["entropy"]]


def sampler_differs(lines: Lines) -> None:
    for line in lines:
        line["signals"]["sampler_logprob"] = [
            v - 0.3 * (1 + math.sin(t)) for t, v in enumerate(line["signals"]["logprob"])
        ]


def credit_of(line: dict[str, Any]) -> dict[str, Any]:
    (entry,) = line["credit"].values()
    return entry


def moved(lines: Lines) -> dict[str, Any]:
    """A response with an advantage that is not 0."""
    return credit_of(next(line for line in lines if abs(credit_of(line)["advantage"][0]) > 0.1))


def credit_scaled(lines: Lines) -> None:
    entry = moved(lines)
    entry["advantage"] = [1.01 * v for v in entry["advantage"]]


def credit_one_token(lines: Lines) -> None:
    moved(lines)["advantage"][3] += 1e-3


def credit_sign(lines: Lines) -> None:
    for line in lines:
        credit_of(line)["advantage"] = [-v for v in credit_of(line)["advantage"]]


def credit_shifted(lines: Lines) -> None:
    """Every advantage and base of a group a little larger: no longer centred."""
    for line in lines[:8]:
        entry = credit_of(line)
        entry["base"] += 0.2
        entry["advantage"] = [v + 0.2 for v in entry["advantage"]]


def credit_swapped(lines: Lines) -> None:
    lines[0]["reward"], lines[8]["reward"] = lines[0]["reward"], lines[8]["reward"]
    for k in range(8):
        a, b = credit_of(lines[k]), credit_of(lines[(k + 1) % 8])
        if a["base"] != b["base"]:
            a["base"], b["base"] = b["base"], a["base"]
            return


def credit_outside_the_mask(lines: Lines) -> None:
    pad(lines[5], -1, advantage=0.5)


def credit_not_kept(lines: Lines) -> None:
    entry = moved(lines)
    next(line for line in lines if credit_of(line) is entry)["keep"] = False


def credit_unknown(lines: Lines) -> None:
    moved(lines)["advantage"][1] = None


def credit_weight_beyond(lines: Lines) -> None:
    moved(lines)["weight"][2] = 4.5


def credit_shaped_reward(lines: Lines) -> None:
    entry = credit_of(lines[0])
    if isinstance(entry["reward"], list):
        entry["reward"][0] += 0.01
    else:
        entry["reward"] += 0.01


def success_flipped(lines: Lines) -> None:
    for k in (3, 40, 41):
        lines[k]["success"] = not lines[k]["success"]


def success_turned(lines: Lines) -> None:
    for line in lines:
        line["success"] = not line["success"]


def truncated_wrong(lines: Lines) -> None:
    wrong = [line for line in lines if not line["success"]]
    for line in wrong[:8]:
        line.update(truncated=True, keep=True)


def repeated_group(lines: Lines) -> None:
    lines += [{**copy.deepcopy(line), "group": "1.copy"} for line in lines[-8:]]


def repeated_step(lines: Lines) -> None:
    later = [line for line in lines if line["step"] == 1]
    lines += [{**copy.deepcopy(line), "group": "again " + line["group"]} for line in later]


def variance_none(lines: Lines) -> None:
    for line in lines:
        line.update(success=True, reward=1.0, rewards={"chain_accuracy": 1.0})


ALL, ENTROPY, SIGNALS = METHODS, ("gtpo", "grpo_s"), ("gtpo", "grpo_s", "datc")
# What is planted, in the files of which methods, which finding, how many; whether the fault was
# there before the credit was assigned.
PLANTED: list[tuple[Callable[[Lines], None], tuple[str, ...], str, int, bool]] = [
    (mask_late, ALL, "mask", 96, True),
    (mask_late, ALL, "mask", 96, False),
    (mask_late_once, ALL, "mask", 1, False),
    (mask_early, ALL, "mask", 96, True),
    (mask_early, ALL, "mask", 96, False),
    (mask_shifted_into_padding, ALL, "mask", 96, True),
    (mask_marks_padding, ALL, "mask", 1, False),
    (mask_marks_an_end_token_that_pads, ALL, "mask", 96, True),
    (mask_marks_left_padding, ALL, "mask", 96, True),
    (mask_marks_the_prompt, ALL, "mask", 96, True),
    (mask_misses_after_the_prompt, ALL, "mask", 96, True),
    (mask_unknown_edge, ENTROPY, "mask", 96, True),
    (mask_filler_edge, ENTROPY, "mask", 96, False),
    (entropy_negative, ENTROPY, "entropy", 1, True),
    (entropy_negative, ENTROPY, "entropy", 1, False),
    (entropy_large, ENTROPY, "entropy", 1, False),
    (logprob_positive, ENTROPY, "logprob", -1, True),
    (temperature_high, ENTROPY, "temperature", -1, True),
    (temperature_low, ENTROPY, "temperature", -1, False),
    (sampler_differs, SIGNALS, "sampler", -1, False),
    (credit_scaled, ALL, "credit", 1, False),
    (credit_one_token, ALL, "credit", 1, False),
    (credit_sign, ALL, "credit", -1, False),
    (credit_shifted, ALL, "credit", 8, False),
    (credit_swapped, ALL, "credit", 2, False),
    (credit_outside_the_mask, ALL, "credit", 1, False),
    (credit_not_kept, ALL, "credit", 1, False),
    (credit_unknown, ALL, "credit", 1, False),
    (credit_weight_beyond, ("datc",), "credit", 1, False),
    (credit_shaped_reward, ENTROPY, "credit", 1, False),
    (success_flipped, ALL, "success", 3, False),
    (success_flipped, ALL, "success", 3, True),
    (success_turned, ALL, "success", 96, True),
    (truncated_wrong, ALL, "truncated", 8, True),
    (repeated_group, ALL, "repeated", 1, False),
    (repeated_step, ALL, "repeated", -1, True),
    (variance_none, ALL, "variance", 12, True),
]


@pytest.mark.parametrize(
    ("plant", "method", "code", "count", "again"),
    [
        pytest.param(plant, method, code, count, again, id=f"{plant.__name__}-{method}-{again}")
        for plant, found_in, code, count, again in PLANTED
        for method in found_in
    ],
)
def test_a_planted_fault_is_found_and_nothing_else(
    plant: Callable[[Lines], None], method: str, code: str, count: int, again: bool, tmp_path: Path
) -> None:
    lines = golden(method)
    plant(lines)
    diagnosis = diagnosed(tmp_path, method, lines, again=again)
    assert [fault.code for fault in diagnosis.faults] == [code], str(diagnosis)
    (fault,) = diagnosis.faults
    assert count in (-1, fault.count), str(diagnosis)
    assert fault.advice and (fault.example or code == "temperature")
    if fault.example:
        assert Path(fault.example.file).name == "rollouts.jsonl"
        line = lines[fault.example.line - 1]
        assert fault.example.token is None or fault.example.token < len(line["mask"])


def test_entropies_above_log_v_need_v(tmp_path: Path) -> None:
    lines = golden("gtpo")
    entropy_above_log_v(lines)
    options = {"method": "gtpo", "again": True}
    assert diagnosed(tmp_path, lines=lines, **options).clean
    for vocabulary in (None, 30):
        if vocabulary is None:
            for line in lines:
                line["meta"]["vocab_size"] = 30
        found = diagnosed(tmp_path, lines=lines, **options, vocab_size=vocabulary).faults
        assert [fault.code for fault in found] == ["entropy"]
        place = found[0].example
        assert place is not None
        assert (place.line, place.response, place.token) == (10, 1, 2)
        for line in lines:
            line["meta"].pop("vocab_size", None)


# -- batches, options, unknown methods -----------------------------------------------------


@pytest.mark.parametrize("size", [1, 400, 10**9])
@pytest.mark.parametrize("plant", [None, credit_one_token, temperature_high, success_flipped])
def test_the_size_of_a_batch_changes_nothing(
    size: int, plant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = golden("gtpo")
    if plant is not None:
        plant(lines)
    path = write(tmp_path, lines)
    whole = diagnose(path)
    monkeypatch.setattr("tokencredit.doctor.diagnosis.BATCH_TOKENS", size)
    parts = diagnose(path)
    assert [(f.code, f.count, f.example) for f in parts.findings] == [
        (f.code, f.count, f.example) for f in whole.findings
    ]


@pytest.mark.parametrize("options", [{"normalise_over": "batch"}, {"share_over": "batch"}])
def test_rules_of_whole_batches(options: dict[str, str], tmp_path: Path) -> None:
    path = write(tmp_path, golden("gtpo"))
    assign_file(path, path, "gtpo", options=options, overwrite=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["meta"]["credit"]["gtpo"].pop("rule")
    assert diagnose(write(tmp_path, lines)).findings == ()
    credit_one_token(lines)
    assert [f.code for f in diagnose(write(tmp_path, lines)).faults] == ["credit"]


def test_a_name_of_its_own_and_an_unknown_rule(tmp_path: Path) -> None:
    path = write(tmp_path, golden("gtpo"))
    assign_file(path, path, "gtpo", options={"alpha2": 0.5}, name="half", overwrite=True)
    assert diagnose(path).findings == ()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["meta"]["credit"]["half"]["rule"] = "gptoo"
    diagnosis = diagnose(write(tmp_path, lines))
    assert diagnosis.clean and "unknown method 'gptoo'" in diagnosis.notes[0].what


def test_a_rule_whose_signal_is_not_there_keeps_its_laws(tmp_path: Path) -> None:
    lines = golden("datc")
    for line in lines:
        del line["signals"]["work"]
    diagnosis = diagnose(write(tmp_path, lines))
    assert diagnosis.clean and "signal 'work'" in diagnosis.notes[0].what
    credit_weight_beyond(lines)
    (fault,) = diagnose(write(tmp_path, lines)).faults
    assert "weights beyond [1/4, 4]" in fault.what


NUMBERS = st.none() | st.floats(-3, 3) | st.sampled_from([0.0, 1e30, -1e30])


@st.composite
def strange_records(draw: st.DrawFn, group: int) -> Record:
    length = draw(st.integers(0, 4))

    def row(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=length, max_size=length))

    name = st.sampled_from(("gtpo", "grpo_s", "grpo", "dapo", "datc", "none"))
    options = st.sampled_from((None, {}, {"normalise_over": "batch"}, {"bound": 1}, {"beta": "x"}))
    tokens = row(st.sampled_from(("a", "<eos>", "<pad>", b"\xff")))
    entry = st.builds(
        CreditRecord,
        base=NUMBERS,
        reward=NUMBERS | st.just(row(NUMBERS)),
        weight=st.none() | st.just(row(NUMBERS)),
        advantage=st.none() | st.just(row(NUMBERS)),
    )
    return Record(
        group=group,
        step=draw(st.none() | st.just(1)),
        tokens=tokens,
        token_ids=draw(st.none() | st.just(row(st.integers(0, 3)))),
        prompt_token_ids=draw(st.none() | st.just([1, 2])),
        mask=row(st.integers(0, 1)),
        reward=draw(NUMBERS),
        rewards=draw(st.dictionaries(st.sampled_from("ab"), NUMBERS)),
        success=draw(st.none() | st.booleans()),
        keep=draw(st.none() | st.booleans()),
        truncated=draw(st.none() | st.booleans()),
        signals={n: row(NUMBERS) for n in draw(st.sets(st.sampled_from(SIGNAL_NAMES)))},
        credit=draw(st.dictionaries(name, entry, max_size=2)),
        meta={"credit": {n: {"options": draw(options)} for n in draw(st.sets(name, max_size=3))}},
    )


SIGNAL_NAMES = ("entropy", "logprob", "old_logprob", "work", "eos")


@settings(max_examples=150)
@given(st.data())
def test_no_record_is_too_strange(data: st.DataObject) -> None:
    """Whatever a file holds, as long as it is records: a diagnosis, never an exception."""
    records = [
        data.draw(strange_records(group))
        for group in range(data.draw(st.integers(1, 3)))
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rollouts.jsonl"
        with RecordWriter(path) as writer:
            for record in records:
                writer.write(record)
        diagnosis = diagnose(path)
    assert diagnosis.responses == len(records)
    json.dumps(diagnosis.as_dict(), allow_nan=False)
    assert str(diagnosis)


# -- the command ----------------------------------------------------------------------------


def test_exit_codes_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(GOLDEN / "gtpo.jsonl.gz")]) == 0
    assert capsys.readouterr().out.endswith("no faults\n")
    lines = golden("gtpo")
    mask_late(lines)
    lines[0]["meta"]["temperature"] = "\x1b[2J"
    path = str(write(tmp_path, lines))
    assert main(["doctor", path]) == 3
    text = capsys.readouterr().out
    assert "fault  mask: " in text and "1 fault" in text and "\x1b" not in text
    assert f"at: {path}:1, response 0, token 0: 'next'" in text
    assert main(["doctor", path, "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["clean"] is False and report["findings"][0]["code"] == "mask"
    assert report["findings"][0]["example"]["line"] == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no records"),
        ("{", "rollouts.jsonl:1: is not JSON"),
        ('{"schema":1,"group":0,"mask":[1],"reward":1}\n', "rollouts.jsonl:1: field 'token_ids'"),
    ],
)
def test_bad_input(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(text)
    assert main(["doctor", str(path)]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert main(["doctor", str(tmp_path / "none.jsonl")]) == 2
    assert main(["doctor", str(path), "--vocab-size", "1"]) == 2


def test_notes_do_not_change_the_exit_code(tmp_path: Path) -> None:
    lines = golden("gtpo")
    for line in lines[:56]:  # seven of the twelve groups
        line.update(success=True, reward=1.0, rewards={"chain_accuracy": 1.0})
    diagnosis = diagnosed(tmp_path, "gtpo", lines, again=True)
    assert diagnosis.clean and [note.code for note in diagnosis.notes] == ["variance"]
