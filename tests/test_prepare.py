"""From raw rows to prompts of a chosen difficulty: the real command on the toy's model, and kills in the middle."""

import json
from collections import Counter
from pathlib import Path

import pytest
from commands import Command, cold, contents, count_lines, read, run, torchrun
from test_sampler import FakeEngine, FakeScorer, coin, fake_ranks, make_prompts, pool_of

import toy
from ada import UserError
from ada.data import DataConfig, load_prompts
from ada.support.options import parse_options
from scripts.prepare import PRESETS, PrepareConfig, account, read_prompts, select
from scripts.responses import Journal

SETTINGS = {"purpose": "prepare", "model": "m", "k": 4, "temperature": 1.0, "max_response_tokens": 8, "seed": 0}


def write_jsonl(path: Path, rows: list) -> str:
    """Rows that are text go into the file as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def options(*arguments: str) -> PrepareConfig:
    return parse_options(PrepareConfig, ["--source=s", "--model=m", "--out=o.jsonl", *arguments])


# ----------------------------------------------------------------------------------------------------------------
# Bad and good rows

BAD_ROWS = {  # kind: (line of the file, cause in the counts)
    "not JSON": ('{"problem": "Q?", "answ', "bad_row"),
    "not an object": ("[1, 2]", "bad_row"),
    "no problem": ('{"answer": "1"}', "bad_row"),
    "an empty problem": ('{"problem": " ", "answer": "1"}', "bad_row"),
    "a problem that is no text": ('{"problem": 7, "answer": "1"}', "bad_row"),
    "no answer": ('{"problem": "Q?"}', "gold_unreadable"),
    "a null answer": ('{"problem": "Q?", "answer": null}', "gold_unreadable"),
    "a NaN answer": ('{"problem": "Q?", "answer": NaN}', "gold_unreadable"),
    "an answer that doesn't parse": ('{"problem": "Q?", "answer": "\\\\frac{1}{"}', "gold_unreadable"),
    "neither answer nor box": (
        '{"problem": "Q?", "answer": "", "solution": "We add. So it is 2, as one sees."}',
        "gold_unreadable",
    ),
}
GOOD = {"problem": "1+1", "answer": "2"}


@pytest.fixture
def prepare(tmp_path, toy_tokenizer, monkeypatch):
    """prepare(rows, options ...) -> (prompts, counts, lines of dropped.log)."""
    monkeypatch.setattr("scripts.prepare.load_tokenizer", lambda model: toy_tokenizer)

    def prepare(rows, *arguments):
        source = write_jsonl(tmp_path / "raw.jsonl", rows)
        config = options(f"--source={source}", f"--out={tmp_path / 'new' / 'o.jsonl'}", *arguments)
        found = read_prompts(config, "m", tmp_path / "work" / "dropped.log", fake_ranks())
        assert list((tmp_path / "new").iterdir()) == []
        return *found, (tmp_path / "work" / "dropped.log").read_text().splitlines()

    return prepare


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_bad_row_is_noted_or_the_end(kind, prepare):
    """Dropped with file and line, or with --strict the end; a broken line of JSON too."""
    line, cause = BAD_ROWS[kind]
    prompts, counts, dropped = prepare([GOOD, line])
    assert len(prompts) == 1 and counts[cause] == 1 and len(dropped) == 1
    assert f"raw.jsonl:2: dropped: {'bad JSON: ' if kind == 'not JSON' else ''}" in dropped[0]
    with pytest.raises(UserError, match=r"raw\.jsonl:2: ") as error:
        prepare([GOOD, line], "--strict")
    assert "\n" not in str(error.value)


def test_duplicates_and_long_rows_are_not_broken(prepare):
    """--strict is for rows that somebody should repair."""
    rows = [GOOD, GOOD, {"problem": "1+" * 40 + "1", "answer": "1"}]  # one token a character
    _, counts, dropped = prepare(rows, "--strict", "--max_problem_tokens=80")
    assert (counts["kept"], counts["duplicate"], counts["too_long"], len(dropped)) == (1, 1, 1, 2)
    assert prepare(rows, "--max_problem_tokens=81")[1]["too_long"] == 0


def test_why_all_rows_went_is_in_the_file(prepare, tmp_path):
    """That is when one looks."""
    with pytest.raises(UserError, match="no prompt left"):
        prepare([{"problem": "1+1", "answer": "x, or y?"}, GOOD], "--max_prompt_tokens=1")
    assert len((tmp_path / "work" / "dropped.log").read_text().splitlines()) == 2


@pytest.mark.parametrize("answer", [2, 3.0, "025", ["$x=1$"], r"$\frac12$", "worked out: #### 1,072", r"\boxed{7}"])
def test_what_is_written_is_read_again_as_the_same(answer, prepare):
    """Gold answers are tidied once, by prepare; reading the written row must not change them any more."""
    [prompt], *_ = prepare([{"problem": "Q?", "answer": answer}])
    assert prepare([{"problem": prompt.problem, "answer": prompt.gold}])[0] == [prompt]


# ----------------------------------------------------------------------------------------------------------------
# Limits and the table


@pytest.mark.parametrize(
    ("arguments", "limits"),
    [
        ([], (1, 16)),
        (["--preset=solvable"], (1, 16)),
        (["--preset=hard"], (1, 2)),  # the paper: 1 or 2 of 16
        (["--preset=easy"], (1, 5)),  # the public code: a pass rate of at most 0.313
        (["--preset=hard", "--k=32"], (1, 4)),
        (["--min-correct=3", "--max-correct=9"], (3, 9)),
        (["--min_correct=3"], (3, 16)),
    ],
)
def test_presets_and_limits(arguments, limits):
    assert (options(*arguments).min_correct, options(*arguments).max_correct) == limits


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset=hard", "--max_correct=3"], "--preset hard stands for a --max_correct"),
        (["--preset=hard", "--k=7"], "no prompt can have 1 to 0 correct of 7"),
        (["--min_correct=3", "--max_correct=2"], "no prompt can have 3 to 2 correct of 16"),
        (["--max_correct=17"], "no prompt can have 1 to 17 correct of 16"),
        (["--min_correct=0"], "--min_correct 0: must be at least 1"),
        (["--out=rows.json"], "--out rows.json: must end in .jsonl"),
        (["--source="], "--source, --model and --out are needed"),
        (["--colour=red"], "unknown option --colour=red"),
    ],
)
def test_impossible_options_are_named(arguments, message):
    with pytest.raises(UserError, match=message):
        options(*arguments)


def test_presets_are_pass_rates():
    """The same limits as comparing n_correct / k with the threshold, as the public code does."""
    for preset, rate in PRESETS.items():
        for k in range(16, 65):
            config = PrepareConfig(source="s", model="m", out="o.jsonl", preset=preset, k=k)
            config.check()
            assert [c for c in range(1, k + 1) if c / k <= rate] == list(range(1, config.max_correct + 1))


def test_rows_are_kept_by_correct_responses_and_the_table_adds_up():
    """One pool for each number of correct responses from 0 to 8; kept are 2 to 5."""
    pools = [pool_of("1" * correct + "0" * (8 - correct), prompt_id=correct) for correct in range(9)]
    rows, dropped = select(pools, options("--k=8", "--min_correct=2", "--max_correct=5"))
    assert [row["n_correct"] for row in rows] == [2, 3, 4, 5]
    assert rows[0]["pass_rate"] == 0.25 and rows[0]["n_samples"] == 8
    assert list(dropped.values()) == [1, 1, 3]
    counts = {"read": 20, "kept": 9, "bad_row": 4, "gold_unreadable": 0, "duplicate": 5, "too_long": 2}
    lines = account(counts, dropped, len(rows), Path("o.jsonl")).splitlines()
    numbers = [int(line.split()[-1]) for line in lines]
    assert numbers[0] == sum(numbers[1:]) == 20 and "unreadable" not in "".join(lines)


# ----------------------------------------------------------------------------------------------------------------
# Responses on disk


class Stop(Exception):
    """Instead of a kill."""


def stop_after(n: int):
    """A policy that stops the whole thing at its n-th response."""
    respond, asked = coin(0.5), []

    def stopping(key, seed):
        asked.append(key)
        if len(asked) > n:
            raise Stop
        return respond(key, seed)

    return stopping


def prompts_for_disk(n: int):
    prompts = make_prompts(n)
    for prompt in prompts:
        prompt.gold = ["right"]  # JSON has no sets
    return prompts


def test_a_journal_draws_what_is_missing_and_nothing_else(tmp_path):
    """Stopped at any response and cut at any byte, it ends with the same pools; complete prompts aren't drawn again."""
    prompts = prompts_for_disk(12)
    whole = Journal(tmp_path / "whole", prompts, SETTINGS, fake_ranks())
    whole.draw_missing(FakeEngine(coin(0.5)), FakeScorer(), "")
    assert [(pool.prompt.prompt_id, len(pool.samples)) for pool in whole.pools()] == [(i, 4) for i in range(12)]
    found = set()
    for cut in range(0, 400, 37):
        journal = Journal(tmp_path / f"cut{cut}", prompts, SETTINGS, fake_ranks())
        engine = FakeEngine(stop_after(40), capacity=6, steps=lambda key: 1 + (key[0] + 5 * key[1]) % 7)
        with pytest.raises(Stop):
            journal.draw_missing(engine, FakeScorer(), "")
        part = Path(f"{journal.path}.rank0.jsonl")
        part.write_bytes(part.read_bytes()[: len(part.read_bytes()) - cut])
        complete = [json.loads(line) for line in part.read_bytes().splitlines(True) if line.endswith(b"\n")]
        complete = {i for i, n in Counter(line["prompt_id"] for line in complete).items() if n == 4}
        found.add(len(complete))
        again = Journal(tmp_path / f"cut{cut}", prompts, SETTINGS, fake_ranks())
        assert {prompt.prompt_id for prompt in again.missing()} == set(range(12)) - complete
        engine = FakeEngine(coin(0.5))
        again.draw_missing(engine, FakeScorer(), "")
        drawn = sorted(key for key, *_ in engine.requests)
        assert drawn == [(i, j) for i in range(12) if i not in complete for j in range(4)]
        assert again.pools() == whole.pools() and again.missing() == []
    assert len(found) > 1 and max(found) > 4


def test_a_journal_keeps_what_other_ranks_wrote(tmp_path):
    """Three ranks were killed, one goes on: nothing of theirs is lost, and what two of them have counts once."""
    prompts = prompts_for_disk(6)
    whole = Journal(tmp_path / "a" / "x", prompts, SETTINGS, fake_ranks())
    whole.draw_missing(FakeEngine(coin(0.5)), FakeScorer(), "")
    lines = {(line["prompt_id"], line["index"]): json.dumps(line) for line in read(Path(f"{whole.path}.rank0.jsonl"))}
    journal = Journal(tmp_path / "b" / "x", prompts, SETTINGS, fake_ranks())
    assert journal.path.name == whole.path.name, "a name is that of its settings"
    for rank, own in enumerate([(4, 0), (0, 2), (5,)]):
        text = [lines[prompt, index] for prompt in own for index in range(4)]
        write_jsonl(Path(f"{journal.path}.rank{rank}.jsonl"), text)
    assert [prompt.prompt_id for prompt in journal.missing()] == [1, 3]
    engine = FakeEngine(coin(0.5))
    journal.draw_missing(engine, FakeScorer(), "")
    assert len(engine.requests) == 8 and journal.pools() == whole.pools()


@pytest.mark.parametrize(("name", "value"), [("k", 5), ("model", "n"), ("seed", 1), ("temperature", 0.5)])
def test_other_settings_or_prompts_have_responses_of_their_own(name, value, tmp_path):
    """Responses of two policies in one table would be nobody's result."""
    prompts = prompts_for_disk(2)
    first = Journal(tmp_path / "a", prompts, SETTINGS, fake_ranks())
    first.draw_missing(FakeEngine(coin(0.5)), FakeScorer(), "")
    assert Journal(tmp_path / "a", prompts, SETTINGS, fake_ranks()).missing() == []
    assert len(Journal(tmp_path / "a", prompts, SETTINGS | {name: value}, fake_ranks()).missing()) == 2
    assert len(Journal(tmp_path / "a", prompts_for_disk(3), SETTINGS, fake_ranks()).missing()) == 3


# ----------------------------------------------------------------------------------------------------------------
# The real command


def raw_rows() -> list:
    """The toy's first training rows in the schemas of the public files, and one of each kind of bad row."""
    rows = []
    for i, row in enumerate(read(Path("out/toy-demo/train.jsonl"))[:40]):
        problem, answer = row["problem"], row["answer"]
        forms = [
            {"problem": problem, "answer": answer},
            {"problem": problem, "answer": float(answer), "url": "x"},
            {"question": problem, "final_answer": [answer], "solution": ["Worked out."]},
            {"problem": problem, "answer": None, "solution": f"So it is $\\boxed{{{answer}}}$."},
        ]
        rows.append(forms[i % 4])
    return [*rows, rows[0], *(line for line, _ in BAD_ROWS.values()), {"problem": "1+" * 20 + "1", "answer": "1"}]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, toy_folder):
    """(folder, arguments, what it printed) of an uninterrupted run on one rank, started from another folder."""
    folder = tmp_path_factory.mktemp("prepared")
    source = write_jsonl(folder / "raw.jsonl", raw_rows())
    arguments = [f"--source={source}", f"--model={toy_folder / 'model'}", "--max_problem_tokens=20", "--k=8"]
    arguments = ["scripts/prepare.py", *arguments, "--max_correct=4"]
    done = run(*arguments, f"--out={folder / 'whole' / 'hard.jsonl'}")
    assert done.returncode == 0, done.stderr
    return folder, arguments, done


def responses_in(work: Path) -> list[dict]:
    """Of all ranks, in order; there are no others."""
    assert len(list(work.glob("responses-*.json"))) == 1
    lines = [line for path in work.glob("responses-*.rank*.jsonl") for line in read(path) if line]
    return sorted(lines, key=lambda line: (line["prompt_id"], line["index"]))


def test_prepare_writes_and_prints_what_it_promises(prepared, toy_tokenizer):
    folder, _, done = prepared
    rows = read(folder / "whole" / "hard.jsonl")
    assert rows and all(1 <= row["n_correct"] <= 4 and row["pass_rate"] == row["n_correct"] / 8 for row in rows)
    lines = {line[:36].strip(" -"): int(line[36:]) for line in done.stdout.splitlines() if line[36:].strip().isdigit()}
    assert lines["rows read"] == 52 == sum(lines.values()) - 52 and lines["kept in hard.jsonl"] == len(rows)
    assert (lines["bad row"], lines["gold unreadable"], lines["duplicate"], lines["too long"]) == (5, 5, 1, 1)
    dropped = (folder / "whole" / "hard.prepare" / "dropped.log").read_text().splitlines()
    numbers = [int(line.split("raw.jsonl:")[1].split(":")[0]) for line in dropped]
    assert sorted(numbers) == list(range(41, 53))
    assert done.stderr.count(": dropped: ") == 10  # duplicates and long ones are in the file alone
    prompts, counts = load_prompts(str(folder / "whole" / "hard.jsonl"), toy_tokenizer, DataConfig())
    assert counts["read"] == counts["kept"] == len(rows)
    assert [prompt.gold for prompt in prompts] == [row["answer"] for row in rows]
    drawn = responses_in(folder / "whole" / "hard.prepare")
    assert [(line["prompt_id"], line["index"]) for line in drawn] == [(i, j) for i in range(40) for j in range(8)]
    for row in rows:  # the verdicts are those of the toy's own verifier
        answers = [toy.boxed(line["text"]) for line in drawn if line["problem"] == row["problem"]]
        assert answers.count(toy.boxed(toy.solve(row["problem"]))) == row["n_correct"]


@pytest.mark.parametrize(
    "kills",
    [[(40, 1)], pytest.param([(20, 1), (96, 2), (170, 1), (250, 3)], marks=pytest.mark.slow)],
    ids=["one", "four"],
)
def test_prepare_goes_on_after_kill_9(prepared, kills):
    """Killed after so many responses on so many ranks, then finished: the uninterrupted run's file and responses."""
    folder, arguments, _ = prepared
    killed = folder / f"killed{len(kills)}"
    again = [*arguments, f"--out={killed / 'hard.jsonl'}"]
    assert any([Command(*again, ranks=ranks).kill_when(lambda n=n: count_lines(killed) >= n) for n, ranks in kills])
    done = run(*again)
    assert done.returncode == 0, done.stderr
    assert (killed / "hard.jsonl").read_bytes() == (folder / "whole" / "hard.jsonl").read_bytes()
    assert responses_in(killed / "hard.prepare") == responses_in(folder / "whole" / "hard.prepare")


def test_other_limits_draw_nothing_again(prepared):
    """A second set from the same responses, without an engine."""
    folder, arguments, _ = prepared
    before = contents(folder / "whole")
    out, work = folder / "easy.jsonl", folder / "whole" / "hard.prepare"
    done = run(*arguments[:-1], f"--out={out}", f"--work={work}", "--min_correct=5")
    assert done.returncode == 0 and "first prompt" not in done.stdout, done.stderr
    assert all(row["n_correct"] >= 5 for row in read(out))
    solved = {line["prompt_id"] for line in responses_in(work) if line["correct"]}
    assert len(read(out)) + len(read(folder / "whole" / "hard.jsonl")) == len(solved)
    assert contents(folder / "whole") == before


@pytest.mark.slow
def test_under_torchrun_an_error_is_a_line_too(prepared):
    """From the command line, where it has to find the packages; no rank waits for another."""
    folder, arguments, _ = prepared
    done = cold(*torchrun(2), *arguments, f"--out={folder / 'raw.jsonl' / 'o.jsonl'}")
    assert done.returncode == 1 and 'prepare.py", line' not in done.stderr, (
        done.stderr
    )  # torchrun's traceback is its own
    assert "] error: " in done.stderr and "raw.jsonl/o.prepare: Not a directory" in done.stderr


@pytest.mark.parametrize(("extra", "message"), [(["--strict"], "raw.jsonl:42: bad JSON"), ([], "Not a directory")])
def test_what_ends_it_early_is_one_line(extra, message, prepared):
    """Before an engine starts. A plain file in the place of the folder stands for one that cannot be written."""
    folder, arguments, _ = prepared
    out = folder / "strict.jsonl" if extra else folder / "raw.jsonl" / "o.jsonl"
    done = run(*arguments, f"--out={out}", *extra)
    *before, last = done.stderr.splitlines()
    assert done.returncode == 1 and last.startswith("[rank 0] error: ") and message in last
    assert all(": dropped: " in line for line in before) and not (folder / "strict.jsonl").exists()
