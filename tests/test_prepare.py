"""From raw rows to prompts of a chosen difficulty: the real command on the toy's model, and kills in the middle."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_data import SCHEMAS, write_jsonl
from test_sampler import FakeEngine, FakeScorer, FakeStore, coin, make_prompts, pool_of

from ada import UserError, toy
from ada.data import DataError, load_prompts
from ada.journal import Journal
from ada.prepare import PRESETS, limit, parse, select, table
from ada.reward import read_gold

ROOT = Path(__file__).parent.parent
SETTINGS = {"purpose": "prepare", "model": "m", "k": 4, "temperature": 1.0, "max_tokens": 8, "seed": 0}


def command(*arguments: str, ranks: int = 0) -> list[str]:
    """`python -m ada.data prepare ...` or `python -m ada.eval ...` for ranks = 0, else under torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*(torchrun if ranks else [sys.executable]), "-m", *map(str, arguments)]


def start(*arguments: str, ranks: int = 0, **options) -> subprocess.Popen:
    """In a process group of its own, so that one signal reaches every rank and grader."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command(*arguments, ranks=ranks),
        cwd=ROOT,
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments: str, ranks: int = 0) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of the finished command."""
    process = start(*arguments, ranks=ranks)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def kill_after_lines(count: int, folder: Path, *arguments: str, ranks: int = 0) -> bool:
    """Start the command and SIGKILL all of it as soon as `folder` holds `count` journal lines.

    Returns whether there was something left to kill: on a busy machine the command may be faster than this loop.
    """
    process = start(*arguments, ranks=ranks)
    deadline = time.monotonic() + 120
    while count_lines(folder) < count and process.poll() is None:
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.005)
    alive = process.poll() is None
    if alive:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return alive


def count_lines(folder: Path) -> int:
    lines = 0
    for path in folder.rglob("*.jsonl"):
        with contextlib.suppress(FileNotFoundError):  # the command joins its files meanwhile
            lines += path.read_bytes().count(b"\n")
    return lines


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by name; locks are empty and hidden."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---------------------------------------------------------------------------------------------------- bad and good rows

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
    "neither answer nor box": ('{"problem": "Q?", "answer": "", "solution": "Easy."}', "gold_unreadable"),
}
GOOD = {"problem": "1+1", "answer": "2"}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_bad_row_is_reported_or_fatal(kind, tmp_path, toy_tokenizer, caplog):
    """Dropped with file and line, or with --strict the end; a broken line of JSON too."""
    line, cause = BAD_ROWS[kind]
    source = write_jsonl(tmp_path / "raw.jsonl", [GOOD, line])
    prompts, counts = load_prompts(source, toy_tokenizer, max_prompt_tokens=99, fatal="nothing")
    assert len(prompts) == 1 and counts[cause] == 1
    assert f"raw.jsonl:2: dropped: {'bad JSON: ' if kind == 'not JSON' else ''}" in caplog.text
    with pytest.raises(DataError, match=r"raw\.jsonl:2: ") as error:
        load_prompts(source, toy_tokenizer, max_prompt_tokens=99, fatal="rows")
    assert "\n" not in str(error.value)


def test_duplicates_and_long_rows_are_not_broken(tmp_path, toy_tokenizer):
    """--strict is for rows that somebody should repair."""
    rows = [GOOD, GOOD, {"problem": "1+" * 40 + "1", "answer": "1"}]
    source = write_jsonl(tmp_path / "raw.jsonl", rows)
    _, counts = load_prompts(source, toy_tokenizer, max_prompt_tokens=99, max_problem_tokens=80, fatal="rows")
    assert (counts["kept"], counts["duplicate"], counts["too_long"]) == (1, 1, 1)
    _, counts = load_prompts(
        source, toy_tokenizer, max_prompt_tokens=99, max_problem_tokens=81
    )  # one token a character
    assert counts["too_long"] == 0


@pytest.mark.parametrize("schema", SCHEMAS)
def test_what_is_written_is_read_again_as_the_same(schema, tmp_path, toy_tokenizer):
    """Gold answers are tidied once, by prepare; reading the written row must not change them any more."""
    row, gold = SCHEMAS[schema]
    assert read_gold(gold) == gold
    source = write_jsonl(tmp_path / "raw.jsonl", [row])
    [prompt], _ = load_prompts(source, toy_tokenizer, max_prompt_tokens=999)
    written = write_jsonl(tmp_path / "out.jsonl", [{"problem": prompt.problem, "answer": prompt.gold}])
    assert load_prompts(written, toy_tokenizer, max_prompt_tokens=999)[0] == [prompt]


# ------------------------------------------------------------------------------------------------- limits and the table


def options(*arguments: str):
    return parse(["--source=s", "--model=m", "--out=o.jsonl", *arguments])


@pytest.mark.parametrize(
    ("arguments", "limits"),
    [
        ([], (1, 16)),
        (["--preset=solvable"], (1, 16)),
        (["--preset=hard"], (1, 2)),  # the paper: 1 or 2 of 16
        (["--preset=easy"], (1, 5)),  # the public code: a pass rate of at most 0.313
        (["--preset=hard", "--k=32"], (1, 4)),
        (["--min-correct=3", "--max-correct=9"], (3, 9)),
        (["--min-correct=3"], (3, 16)),
    ],
)
def test_presets_and_limits(arguments, limits):
    assert (options(*arguments).min_correct, options(*arguments).max_correct) == limits


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset=hard", "--max-correct=3"], "--preset stands for"),
        (["--preset=hard", "--k=7"], "at most 12.5% right is none of --k 7"),
        (["--min-correct=3", "--max-correct=2"], "no prompt can have 3 to 2 right of 16"),
        (["--max-correct=17"], "no prompt can have 1 to 17 right of 16"),
        (["--min-correct=0"], "'0' is not a count"),
        (["--out=rows.json"], "--out rows.json: must end in .jsonl"),
        (["--colour=red"], "unrecognized arguments: --colour=red"),
    ],
)
def test_impossible_options_are_named(arguments, message):
    with pytest.raises(UserError, match=message):
        options(*arguments)


def test_presets_are_pass_rates():
    """The same limits as comparing n_correct / k with the threshold, as the public code does."""
    for preset, rate in PRESETS.items():
        for k in range(16, 65):
            assert [c for c in range(1, k + 1) if c / k <= rate] == list(range(1, limit(preset, k) + 1))


def test_rows_are_kept_by_right_responses_and_the_table_adds_up():
    """One pool for each number of right responses from 0 to 8; kept are 2 to 5."""
    pools = [pool_of("1" * right + "0" * (8 - right), row=right) for right in range(9)]
    chosen = options("--k=8", "--min-correct=2", "--max-correct=5")
    rows, dropped = select(pools, chosen)
    assert [row["n_correct"] for row in rows] == [2, 3, 4, 5]
    assert rows[0]["pass_rate"] == 0.25 and rows[0]["n_samples"] == 8
    assert list(dropped.values()) == [1, 1, 3]
    counts = {"read": 20, "kept": 9, "bad_row": 4, "gold_unreadable": 0, "duplicate": 5, "too_long": 2}
    lines = table(counts, dropped, len(rows), chosen).splitlines()
    numbers = [int(line.split()[-1]) for line in lines]
    assert numbers[0] == sum(numbers[1:]) == 20 and "unreadable" not in "".join(lines)


# ---------------------------------------------------------------------------------------------------------- the journal


def one_rank(rank: int = 0, store=None):
    """Ranks of which only this one is there."""
    gather = lambda items, key=None: sorted(items, key=key) if key else list(items)  # noqa: E731
    return SimpleNamespace(rank=rank, world_size=1, store=store or FakeStore(), gather=gather, barrier=lambda: None)


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


def test_a_journal_draws_what_is_missing_and_nothing_else(tmp_path):
    """Stopped at any response and cut at any byte, it ends with the same file, and each response is drawn once."""
    prompts = make_prompts(12, gold=["right"])
    for prompt in prompts:
        prompt.gold = ["right"]  # JSON has no sets
    whole = Journal(tmp_path / "whole", prompts, SETTINGS, one_rank())
    whole.fill(FakeEngine(coin(0.5)), FakeScorer(), "")
    expected = (tmp_path / "whole.jsonl").read_bytes()
    assert [pool.prompt.row for pool in whole.pools()] == list(range(12))
    assert all(len(pool.samples) == 4 for pool in whole.pools())
    everything = {(row, index) for row in range(12) for index in range(4)}
    for cut in range(0, 400, 37):
        path = tmp_path / f"cut{cut}"
        journal = Journal(path, prompts, SETTINGS, one_rank())
        with pytest.raises(Stop):
            journal.fill(
                FakeEngine(stop_after(30), capacity=6, steps=lambda key: 1 + (key[0] + 5 * key[1]) % 7),
                FakeScorer(),
                "",
            )
        journal._lock.close()
        part = tmp_path / f"cut{cut}.rank0.jsonl"
        part.write_bytes(part.read_bytes()[: len(part.read_bytes()) - cut])
        complete = [json.loads(line) for line in part.read_bytes().splitlines(True) if line.endswith(b"\n")]
        survivors = {(line["row"], line["index"]) for line in complete}
        assert len(survivors) > 10 and set(Counter(row for row, _ in survivors).values()) - {4}  # some prompts by half
        again = Journal(path, prompts, SETTINGS, one_rank())
        assert {prompt.row for prompt in again.missing} == {row for row, _ in everything - survivors}
        engine = FakeEngine(coin(0.5))
        again.fill(engine, FakeScorer(), "")
        assert sorted(key for key, _, _ in engine.requests) == sorted(everything - survivors)
        assert path.with_suffix(".jsonl").read_bytes() == expected and not part.exists()


def test_a_journal_keeps_what_other_ranks_wrote(tmp_path):
    """Three ranks were killed, one goes on: nothing of theirs is lost, and what two of them have counts once."""
    prompts = make_prompts(6, gold=["right"])
    for prompt in prompts:
        prompt.gold = ["right"]
    Journal(tmp_path / "a", prompts, SETTINGS, one_rank()).fill(FakeEngine(coin(0.5)), FakeScorer(), "")
    lines = (tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    for rank, mine in enumerate([[16, 17, 18, 19, 0], [9, 8, 0], [23, 20, 21, 22]]):  # 4 lines a row
        (tmp_path / f"b.rank{rank}.jsonl").write_bytes(b"".join(lines[i] for i in mine))
    journal = Journal(tmp_path / "b", prompts, SETTINGS, one_rank())
    assert [prompt.row for prompt in journal.missing] == [0, 1, 2, 3]
    engine = FakeEngine(coin(0.5))
    journal.fill(engine, FakeScorer(), "")
    assert len(engine.requests) == 24 - 11
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "a.jsonl").read_bytes()


@pytest.mark.parametrize(("name", "value"), [("k", 5), ("model", "n"), ("seed", 1), ("temperature", 0.0)])
def test_a_journal_refuses_other_settings(name, value, tmp_path):
    """Responses of two policies in one table would be nobody's result."""
    prompts = make_prompts(2, gold=["right"])
    Journal(tmp_path / "a", prompts, SETTINGS, one_rank())._lock.close()
    with pytest.raises(UserError, match=f"{name} was .*: give another --out"):
        Journal(tmp_path / "a", prompts, SETTINGS | {name: value}, one_rank())
    with pytest.raises(UserError, match="prompts was '2, .*', is '3, "):
        Journal(tmp_path / "a", make_prompts(3, gold=["right"]), SETTINGS, one_rank())


def test_two_processes_do_not_write_one_journal(tmp_path):
    prompts = make_prompts(2, gold=["right"])
    first = Journal(tmp_path / "a", prompts, SETTINGS, one_rank())
    with pytest.raises(UserError, match="another process is at work here"):
        Journal(tmp_path / "a", prompts, SETTINGS, one_rank())
    first._lock.close()
    Journal(tmp_path / "a", prompts, SETTINGS, one_rank())


# ----------------------------------------------------------------------------------------------------- the real command


def raw_rows() -> list:
    """The toy's first training rows in the schemas of the public files, and one of each kind of bad row."""
    problems = [row["problem"] for row in read(Path(toy.locate("toy-demo/train")))[:40]]
    rows = []
    for i, problem in enumerate(problems):
        answer = toy.boxed(toy.solve(problem))
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
    """(folder, arguments, stdout, stderr) of an uninterrupted run on one rank."""
    folder = tmp_path_factory.mktemp("prepared")
    source = write_jsonl(folder / "raw.jsonl", raw_rows())
    arguments = ["ada.data", "prepare", f"--source={source}", "--model=toy-demo/model", "--max-problem-tokens=20"]
    status, out, err = run(*arguments, f"--out={folder / 'whole' / 'hard.jsonl'}", "--k=8", "--max-correct=4")
    assert status == 0, err
    return folder, [*arguments, "--k=8", "--max-correct=4"], out, err


def test_prepare_writes_and_prints_what_it_promises(prepared, toy_tokenizer):
    folder, _, out, err = prepared
    rows = read(folder / "whole" / "hard.jsonl")
    assert rows and all(1 <= row["n_correct"] <= 4 and row["pass_rate"] == row["n_correct"] / 8 for row in rows)
    lines = {line[:36].strip(" -"): int(line[36:]) for line in out.splitlines() if line[36:].strip().isdigit()}
    assert lines["rows read"] == 52 == sum(lines.values()) - 52 and lines["kept in hard.jsonl"] == len(rows)
    assert (lines["broken row"], lines["answer unreadable"], lines["duplicate"], lines["too long"]) == (5, 5, 1, 1)
    dropped = (folder / "whole" / "hard.prepare" / "dropped.log").read_text().splitlines()
    assert [line.split("raw.jsonl:")[1].split(":")[0] for line in dropped] == [str(i) for i in range(41, 53)]
    assert err.count(": dropped: ") == 10  # duplicates and long ones are in the file alone
    prompts, counts = load_prompts(str(folder / "whole" / "hard.jsonl"), toy_tokenizer, max_prompt_tokens=32)
    assert counts["read"] == counts["kept"] == len(rows)
    drawn = read(folder / "whole" / "hard.prepare" / "responses.jsonl")
    assert [(line["row"], line["index"]) for line in drawn] == [(row, i) for row in range(40) for i in range(8)]
    for row in rows:  # the verdicts are those of the toy's own verifier
        answers = [toy.boxed(line["text"]) for line in drawn if line["problem"] == row["problem"]]
        assert answers.count(toy.boxed(toy.solve(row["problem"]))) == row["n_correct"]


@pytest.mark.parametrize(
    "kills",
    [[(43, 0)], pytest.param([(20, 0), (101, 2), (177, 0), (253, 3)], marks=pytest.mark.slow)],
    ids=["one", "four"],
)
def test_prepare_goes_on_after_kill_9(prepared, kills):
    """Killed after so many responses on so many ranks, then finished: byte for byte the uninterrupted run's files."""
    folder, arguments, _, _ = prepared
    killed = folder / f"killed{len(kills)}"
    again = [*arguments, f"--out={killed / 'hard.jsonl'}"]
    assert any([kill_after_lines(lines, killed, *again, ranks=ranks) for lines, ranks in kills])
    status, _, err = run(*again)
    assert status == 0, err
    assert contents(killed) == contents(folder / "whole")


def test_other_limits_draw_nothing_again(prepared):
    """A second set from the same responses, without an engine."""
    folder, arguments, _, _ = prepared
    before = contents(folder / "whole")
    out, work = folder / "easy.jsonl", folder / "whole" / "hard.prepare"
    status, printed, err = run(*arguments[:-1], f"--out={out}", f"--work={work}", "--min-correct=5")
    assert status == 0 and "first prompt" not in printed, err
    assert all(row["n_correct"] >= 5 for row in read(out))
    solved = {line["row"] for line in read(work / "responses.jsonl") if line["correct"]}
    assert len(read(out)) + len(read(folder / "whole" / "hard.jsonl")) == len(solved)
    assert contents(folder / "whole") == before


def test_strict_names_the_row(prepared):
    folder, arguments, _, _ = prepared
    status, _, err = run(*arguments, f"--out={folder / 'strict.jsonl'}", "--strict")
    assert status == 1 and err.startswith("[rank 0] error: ") and "raw.jsonl:42: bad JSON" in err
    assert len(err.splitlines()) == 1 and not (folder / "strict.jsonl").exists()
