"""scripts/evaluate.py: errors and means, the table, responses that outlive a kill; the real command on the toy."""

import contextlib
import json
import os
import random
import shutil
import statistics
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from commands import Command, contents, count_lines, read, run
from test_data import write_jsonl
from test_eval import POOLS
from test_sampler import FakeEngine, FakeScorer, FakeStore, coin, fake_ranks, make_prompts, pool_of

from ada import UserError
from ada.sampler import seed_of
from ada.support.options import parse_options
from scripts.evaluate import EvalConfig, combine, label_of, result, standard_error, tables
from scripts.responses import DrawConfig, Journal, find_model, settings_of, short_name

# ----------------------------------------------------------------------------------------------------------------
# The table


def test_errors_are_those_of_a_mean_over_problems():
    """Near what drawing the problems anew gives, for one benchmark and for a mean weighted by prompts."""
    rng = np.random.default_rng(0)
    benchmarks = [rng.random(60) ** 2, rng.random(200)]
    drawn = [[rng.choice(b, len(b)) for b in benchmarks] for _ in range(4000)]
    errors = [standard_error(list(b)) for b in benchmarks]
    for i, error in enumerate(errors):
        assert error == pytest.approx(np.std([draw[i].mean() for draw in drawn]), rel=0.1)
    together = np.std([np.concatenate(draw).mean() for draw in drawn])
    assert combine([0, 0], errors, [60, 200])[1] == pytest.approx(together, rel=0.1)
    assert standard_error([0.25] * 50) == standard_error([0.25]) == 0


def test_weighted_mean_is_the_mean_over_all_prompts():
    """Weighted by prompts, a large benchmark counts for more; the plain mean is another number."""
    benchmarks = [[0.0, 1.0], [0.5] * 7, [0.25]]
    means, sizes = [statistics.mean(b) for b in benchmarks], [len(b) for b in benchmarks]
    assert combine(means, [0, 0, 0], sizes)[0] == pytest.approx(statistics.mean(sum(benchmarks, [])))
    assert combine(means, [0, 0, 0], [1, 1, 1])[0] == pytest.approx((0.5 + 0.5 + 0.25) / 3)


def test_a_result_counts_what_was_scored():
    """By hand; a nominal k in a denominator would be wrong as soon as one response is missing."""
    row = result("m", "d", POOLS, k=4)
    assert (row["prompts"], row["ave"]) == (3, pytest.approx((1 / 4 + 0 + 1) / 3))
    assert row["pass"] == pytest.approx({"1": (1 / 4 + 0 + 1) / 3, "2": 1.5 / 3, "4": 2 / 3})
    assert row["all_right"] == pytest.approx({"1": (1 / 4 + 0 + 1) / 3, "2": 1 / 3, "4": 1 / 3})
    assert (row["length"], row["truncated"]) == (2.5, 1 / 4)
    assert result("m", "d", [pool_of("10")], k=2)["ave"] == 0.5


def test_the_table_has_a_column_per_benchmark_and_both_means():
    rows = [
        {"model": m, "data": d, "prompts": n, "k": 2, "ave": ave, "error": 0.01, "pass": {"1": ave, "2": ave},
         "all_right": {"1": ave, "2": ave}, "length": 7.0, "truncated": 0.5}
        for m, d, n, ave in [("base", "math500", 300, 0.5), ("base", "minerva", 100, 0.1),
                             ("trained", "math500", 300, 0.6), ("trained", "minerva", 100, 0.2)]
    ]  # fmt: skip
    lines = tables(rows, "Ave@2", ["a note"]).splitlines()
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("|")]
    assert cells[0] == ["model", "math500 (300)", "minerva (100)", "mean", "weighted"]
    assert cells[2] == ["base", "50.0 ± 1.0", "10.0 ± 1.0", "30.0 ± 0.7", "40.0 ± 0.8"]
    assert cells[3][0] == "trained" and cells[3][-1] == "50.0 ± 0.8"
    assert cells[4][:2] == ["model", "data"] and cells[4][-1] == "truncated" and len(cells) == 4 + 2 + 4
    assert lines[-1] == "a note"


# ----------------------------------------------------------------------------------------------------------------
# Options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model m --data a/x.jsonl b/x.jsonl", "--data: two of these have the same name"),
        ("--model a/b/m x/b/m --data d", "--model: two of these have the same name"),
        ("--model m --data d --k 0", "--k 0: must be at least 1"),
        ("--model m --data d --k many", "--k: invalid int value: 'many'"),
        ("--data d", "--model: give at least one"),
        ("--model m --data d --colour red", "unknown option --colour"),
    ],
)
def test_impossible_options_are_named(arguments, message):
    with pytest.raises(UserError, match=message) as refused:
        parse_options(EvalConfig, arguments.split())
    assert "\n" not in str(refused.value)


def test_options():
    """The paper's settings, unless told otherwise; dashes work, too."""
    config = parse_options(EvalConfig, "--model m n --data d e".split())
    assert (config.k, config.temperature, config.max_response_tokens, config.greedy) == (32, 1.0, 4096, False)
    assert (config.model, config.data, config.folders) == (["m", "n"], ["d", "e"], ["m", "n"])
    greedy = parse_options(EvalConfig, "--model m --data d --greedy --max-response-tokens 24".split())
    assert (greedy.k, greedy.temperature, greedy.max_response_tokens) == (1, 0.0, 24)


def test_a_run_stands_for_its_newest_checkpoint(tmp_path):
    """--model out/RUN; and other names stay what they are."""
    for step in ("step-000020", "step-000040", "step-000060.tmp"):
        (tmp_path / "run" / "checkpoints" / step).mkdir(parents=True)
        (tmp_path / "run" / "checkpoints" / step / "complete.json").write_text("{}")
    newest = tmp_path / "run" / "checkpoints" / "step-000040" / "hf"
    assert find_model(str(tmp_path / "run")) == str(newest) and short_name(str(newest)) == "run/step-000040"
    assert find_model("Qwen/Qwen3-4B-Instruct-2507") == "Qwen/Qwen3-4B-Instruct-2507"
    assert label_of("org/data") == "org/data"


# ----------------------------------------------------------------------------------------------------------------
# Responses on disk

SETTINGS = {"purpose": "eval", "model": "m", "k": 4, "temperature": 1.0, "seed": 0}


class Killed(BaseException):
    """Nothing catches it, so what was on the disk at that moment stays there."""


class Crowd(FakeEngine):
    """An engine whose responses end in any order; with `polls` it is killed after so many."""

    def __init__(self, polls=None, p=0.5):
        rng = random.Random(1)
        super().__init__(coin(p), capacity=9, steps=lambda key: rng.randint(1, 9))
        self.polls = polls

    def poll(self):
        if self.polls is not None:
            self.polls -= 1
            if self.polls < 0:
                raise Killed
        return super().poll()


def open_journal(path, prompts, *, store=None, rank=0, **settings) -> Journal:
    return Journal(path / "name", prompts, SETTINGS | settings, fake_ranks(store, rank))


def prompts_of(n):
    """Golds go to disk as JSON."""
    return [replace(prompt, gold=["right"], problem=f"problem {prompt.prompt_id}") for prompt in make_prompts(n)]


def test_a_killed_evaluation_draws_what_is_missing_and_nothing_else(tmp_path):
    """Each prompt's responses are there or not; killed again and again it ends as if there had been no kill."""
    prompts = prompts_of(30)
    whole = open_journal(tmp_path / "whole", prompts)
    whole.draw_missing(Crowd(), FakeScorer(random.Random(0)), "")
    assert [(pool.prompt.prompt_id, len(pool.samples)) for pool in whole.pools()] == [(i, 4) for i in range(30)]

    requests, n_kills = [], 0
    while True:
        journal = open_journal(tmp_path / "killed", prompts)
        missing = {prompt.prompt_id for prompt in journal.missing()}
        engine = Crowd(polls=12)
        try:
            journal.draw_missing(engine, FakeScorer(random.Random(n_kills)), "")
        except Killed:
            n_kills += 1
            [file] = (tmp_path / "killed").glob("*.rank0.jsonl")
            with file.open("a") as cut_short:
                cut_short.write('{"prompt_id": 29, "ind')
        assert {key[0] for key, *_ in engine.requests} <= missing, "what was complete was drawn again"
        assert all(seed == seed_of("eval", 0, 0, *key) for key, _, seed in engine.requests)
        requests += engine.requests
        if not journal.missing():
            break
    assert n_kills > 3
    assert journal.pools() == whole.pools()
    lines = []
    for text in file.read_text().splitlines():
        with contextlib.suppress(ValueError):  # those that were cut short
            lines.append(json.loads(text))
    drawn = Counter((line["prompt_id"], line["index"]) for line in lines if line)
    assert drawn == dict.fromkeys([(i, j) for i in range(30) for j in range(4)], 1)
    assert {line["problem"] for line in lines if line} == {f"problem {i}" for i in range(30)}
    open_journal(tmp_path / "killed", prompts).draw_missing(idle := Crowd(), FakeScorer(), "")
    assert idle.requests == []


def test_ranks_write_files_of_their_own_and_read_all(tmp_path):
    prompts, store = prompts_of(10), FakeStore()
    first, second = (open_journal(tmp_path, prompts, store=store, rank=rank) for rank in (0, 1))
    engine = Crowd(polls=8)
    with pytest.raises(Killed):
        first.draw_missing(engine, FakeScorer(), "")
    done = {pool.prompt.prompt_id for pool in first.pools()}
    assert 0 < len(done) < 10
    second.missing = lambda: prompts  # as it was when both began
    second.draw_missing(other := Crowd(), FakeScorer(), "")  # those that rank 0 has not taken
    taken = {key[0] for key, *_ in engine.requests}
    assert {key[0] for key, *_ in other.requests} == set(range(10)) - taken
    again = open_journal(tmp_path, prompts)
    assert {prompt.prompt_id for prompt in again.missing()} == taken - done
    again.draw_missing(Crowd(), FakeScorer(), "")
    alone = open_journal(tmp_path / "alone", prompts)
    alone.draw_missing(Crowd(), FakeScorer(), "")
    assert again.pools() == alone.pools()


@pytest.mark.parametrize("other", [{"k": 5}, {"temperature": 0.5}, {"seed": 1}, {"model": "n"}, {"files": "others"}])
def test_other_settings_draw_into_other_files(other, tmp_path):
    """Mixed with what is there, they would give a number that is no model's."""
    prompts = prompts_of(3)
    open_journal(tmp_path, prompts).draw_missing(Crowd(), FakeScorer(), "")
    before = contents(tmp_path)
    journal = open_journal(tmp_path, prompts, **other)
    assert len(journal.missing()) == 3
    journal.draw_missing(Crowd(), FakeScorer(), "")
    assert contents(tmp_path).items() >= before.items()
    assert not open_journal(tmp_path, prompts).missing()
    assert len(open_journal(tmp_path, prompts[:2]).missing()) == 2, "other prompts"


@pytest.mark.parametrize("file", ["model.safetensors", "generation_config.json", "tokenizer.json"])
def test_changed_files_of_a_model_are_another_setting(file, tmp_path):
    """Weights written anew in the same place, other stop ids, another tokenizer: none of the responses is its own."""
    for name in ("model.safetensors", "generation_config.json", "tokenizer.json", "README.md"):
        (tmp_path / name).write_text("one")
    before = settings_of(str(tmp_path), DrawConfig(), "eval")
    (tmp_path / "README.md").write_text("another")
    assert settings_of(str(tmp_path), DrawConfig(), "eval") == before
    stamp = (tmp_path / file).stat()
    (tmp_path / file).write_text("two")  # as long as the other one
    os.utime(tmp_path / file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    assert settings_of(str(tmp_path), DrawConfig(), "eval") != before


# ----------------------------------------------------------------------------------------------------------------
# The real command

SCRIPT = "scripts/evaluate.py"

# Rows in the schemas of the public benchmarks (problems of our own). The toy cannot solve them; the mechanics must.
SLICES = {
    "minerva_math": [
        {"problem": "How large is $s$?", "solution": r"So $s=\boxed{1.6}$ cm", "type": "Astronomy", "idx": 0},
        {"problem": "Where?", "solution": "Nowhere to be seen.", "type": "Astronomy", "idx": 1},  # no gold: dropped
    ],
    "olympiadbench": [
        {"question": "How many moves?", "solution": ["Two."], "final_answer": ["2"], "unit": None, "context": None}
    ],
}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory, toy_folder):
    """(folder, arguments, stdout): the toy on two slices and a part of its test set, uninterrupted."""
    folder = tmp_path_factory.mktemp("evaluated")
    test = (toy_folder / "test.jsonl").read_text().splitlines()[:24]
    files = [write_jsonl(folder / "toy.jsonl", test)]
    files += [write_jsonl(folder / f"{name}.jsonl", rows) for name, rows in SLICES.items()]
    arguments = ["--data", *files, "--k=8", "--max_response_tokens=24", "--model", "out/toy-demo/model"]
    done = run(SCRIPT, *arguments, f"--out={folder / 'whole'}")
    assert done.returncode == 0, done.stderr
    return folder, arguments, done.stdout


def test_it_writes_and_prints_what_it_promises(evaluated):
    """The numbers are those of the responses on disk."""
    folder, _, out = evaluated
    table = (folder / "whole" / "table.md").read_text()
    assert table in out and out.count("the first prompt is") == 3
    assert "toy (24)" in table and "minerva_math (1)" in table
    assert "minerva is graded by math-verify" in table and "minerva_math: 1 of 2 rows: 1 gold unreadable" in table
    results = json.loads((folder / "whole" / "results.json").read_text())
    assert [(r["model"], r["data"]) for r in results] == [("toy-demo/model", data) for data in ("toy", *SLICES)]
    for r in results:
        [file] = (folder / "whole" / "toy-demo--model").glob(f"{r['data']}-*.rank0.jsonl")
        responses = read(file)
        assert len(responses) == 8 * r["prompts"]
        assert r["ave"] == pytest.approx(sum(response["correct"] for response in responses) / len(responses))
        assert r["truncated"] == sum(response["truncated"] for response in responses) / len(responses)
    assert results[0]["ave"] > 0.1  # the toy's own problems


def test_the_same_command_only_reports(evaluated):
    folder, arguments, out = evaluated
    before = contents(folder / "whole")
    done = run(SCRIPT, *arguments, f"--out={folder / 'whole'}")
    assert done.returncode == 0 and "first prompt" not in done.stdout and contents(folder / "whole") == before
    assert done.stdout.strip() == out[out.index("Ave@8") :].strip()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_models_and_four_kills(evaluated, ranks):
    """Killed in the first model, in the second, in between: both end with the numbers of the uninterrupted one."""
    folder, arguments, _ = evaluated
    copy, killed = folder / f"copies{ranks}" / "copy", folder / f"killed{ranks}"
    shutil.copytree("out/toy-demo/model", copy)
    arguments, kills = [*arguments, copy, f"--out={killed}"], []
    for lines in (21, 130, 240, 360):
        command = Command(SCRIPT, *arguments, ranks=ranks)
        kills.append(command.kill_when(lambda lines=lines: killed.exists() and count_lines(killed) >= lines))
    assert any(kills)
    done = run(SCRIPT, *arguments, ranks=ranks)
    assert done.returncode == 0, done.stderr
    both, one = (json.loads((path / "results.json").read_text()) for path in (killed, folder / "whole"))
    assert both[:3] == one and [r["model"] for r in both[3:]] == [f"copies{ranks}/copy"] * 3
    assert [r | {"model": "toy-demo/model"} for r in both[3:]] == one  # equal weights and seeds


@pytest.mark.slow
def test_greedy_is_one_response_and_files_of_its_own(evaluated):
    folder, arguments, _ = evaluated
    before = contents(folder / "whole")
    done = run(SCRIPT, *arguments, f"--out={folder / 'whole'}", "--greedy")
    assert done.returncode == 0 and "Greedy accuracy" in done.stdout, done.stderr
    after = contents(folder / "whole")
    assert all(after[name] == before[name] for name in before)
    assert {name for name in after.keys() - before.keys() if ".greedy" not in name} == set()
    results = json.loads((folder / "whole" / "results.greedy.json").read_text())
    assert all(list(r["pass"]) == ["1"] and r["ave"] == r["pass"]["1"] for r in results)
