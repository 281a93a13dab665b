"""From runs' logs to the tables in the pages, and the plan of the runs."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ada import UserError
from experiments import figures, results, spurious
from experiments.figures import PLAN, Job, read_plan, run_all
from experiments.results import at, read_run, refresh, show, tables

ROOT = Path(__file__).parent.parent


def line(step, row, index, response, *, problem="3+4-9", correct=True, advantage=None):
    return json.dumps(
        {
            **{"step": step, "row": row, "index": index, "prompt": f"<bos>{problem} Let's think<|assistant|>"},
            **{"response": response, "correct": correct, "advantage": advantage},
        }
    )


@pytest.fixture
def run(tmp_path):
    """Two windows of two steps; 3+4-9 is 7, 8."""
    folder = tmp_path / "mixed-balance-seed0"
    folder.mkdir()
    (folder / "config.json").write_text('{"group_size": 4, "prompts_per_step": 2}')
    rows = [{"step": 0, "eval/reward": 0.1, "eval/pass@16": 0.2}]
    for step in (1, 2, 3, 4):
        row = dict.fromkeys(results.MEANS, step / 10) | {"step": step, "update/groups": 1}
        row |= {"sampling/samples": 10 * step, "sampling/tokens": 80, "time/step": 0.5}
        rows.append(row | ({"eval/reward": 0.1 * step, "eval/pass@16": 0.5} if step % 2 == 0 else {}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    right, luck, wrong = r"7, 8, \boxed{8}", r"6, 8, \boxed{8}", r"6, 5, \boxed{5}"
    samples = [
        *(line(1, 0, i, wrong, correct=False) for i in range(6)),
        *(line(1, 0, 6, right, advantage=0.5), line(1, 0, 7, luck, advantage=0.5)),  # 2 of 8
        *(line(2, 1, 0, right), line(2, 1, 1, luck, correct=False)),  # both answers right, to a reward for chains one
        *(line(3, 0, 0, right), line(3, 0, 1, right)),  # 2 of 2
    ]
    (folder / "samples.jsonl").write_text("\n".join(samples) + "\n")
    return folder


def test_a_run_becomes_windows(run):
    record = read_run(run)
    assert [window["step"] for window in record["windows"]] == [0, 2, 4]
    assert [window["samples"] for window in record["windows"]] == [0, 30, 100]
    assert [window["groups"] for window in record["windows"]] == [0, 2, 4]
    assert [window["eval/reward"] for window in record["windows"]] == [0.1, 0.2, 0.4]
    assert [window.get("reward/first_round") for window in record["windows"]] == [None, 0.15, 0.35]


def test_spurious_answers_are_counted(run):
    """Right by the box, wrong by the chain; also under a reward that didn't pay for them."""
    counts = spurious.count(run / "samples.jsonl", [0, 2, 4])
    assert counts[0] == {}
    first = counts[2]
    kinds = ("all", "right", "spurious")
    assert [first[f"drawn up to 1/2: {kind}"] for kind in kinds] == [8, 2, 1]
    assert [first[f"drawn above 1/2: {kind}"] for kind in kinds] == [2, 2, 1]
    assert (first["kept: all"], first["kept: right"], first["kept: spurious"]) == (2, 2, 1)
    assert (first["first: all"], first["first: right"], first["first: spurious"]) == (
        6,
        2,
        1,
    )
    assert counts[4]["drawn above 1/2: right"] == 2 and counts[4]["drawn above 1/2: spurious"] == 0
    record = read_run(run)
    assert spurious.share(record, "first", slice(0, 1)) == 0.5
    assert spurious.share(record, "first", slice(0, 1), "all", "chains") == 1 / 6
    assert math.isnan(spurious.share(record, "kept", slice(-1, None)))


def test_between_evaluations_in_a_straight_line(run):
    record = read_run(run)
    assert at(record, "eval/reward", "samples", 15) == pytest.approx(0.15)
    assert at(record, "eval/reward", "samples", 65) == pytest.approx(0.3)
    assert at(record, "eval/reward", "samples", 102) == pytest.approx(0.4)  # 2% beyond the end
    assert at(record, "eval/reward", "samples", 110) is None


def test_show():
    assert show([0.5, 0.52, 0.54], 100) == "52.0 ± 1.2"
    assert show([1.0]) == "1.0"
    assert show([math.nan, 1.0, 3.0]) == "2.0 ± 1.0"
    assert show([math.nan]) == ""


def test_a_page_keeps_all_but_its_tables(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: a -->\nold\nolder\n<!-- end -->\nbetween\n<!-- table: b -->\n<!-- end -->\n")
    refresh(page, {"a": "| new |", "b": "| b |"})
    assert page.read_text() == (
        "before\n<!-- table: a -->\n| new |\n<!-- end -->\nbetween\n<!-- table: b -->\n| b |\n<!-- end -->\n"
    )
    with pytest.raises(KeyError):
        refresh(page, {"a": ""})


def test_the_pages_show_what_the_results_say(tmp_path):
    """Edited by hand, or not refreshed after new runs, a table would state what nobody measured."""
    made = tables(json.loads((ROOT / results.RESULTS).read_text()))
    for page in results.PAGES:
        text = (ROOT / page).read_text()
        assert "<!-- table: " in text
        copy = tmp_path / page.name
        copy.write_text(text)
        refresh(copy, made)
        assert copy.read_text() == text, page


# ----------------------------------------------------------------------------------------------------------------
# The plan


def test_the_plan_has_what_is_compared():
    names = {job.name for job in read_plan(ROOT / PLAN, quick=False)}
    samplers = "grpo grpo-24 passive two_stage pos balance".split()
    assert names >= {f"{s}-{name}-seed{i}" for s in ("mixed", "hard") for name in samplers for i in range(3)}
    assert names >= {f"mixed-{name}-seed{i}" for name in ("balance", "signal", "memory") for i in range(5)}
    assert all(re.fullmatch(r"[a-z]+-[a-z0-9_-]+-seed\d", name) for name in names)


def test_quick_is_the_same_comparison_at_a_tenth_of_the_steps():
    jobs, quick = read_plan(ROOT / PLAN, quick=False), read_plan(ROOT / PLAN, quick=True)
    assert {job.name for job in quick} == {job.name for job in jobs if job.seed == 0}
    steps = {job.name: job.steps for job in jobs}
    assert all(job.steps == steps[job.name] // 10 for job in quick)


def test_a_bad_plan_is_one_clear_line(tmp_path):
    (tmp_path / "plan.yaml").write_text(
        f"options: {{}}\nsets: {{mixed: {ROOT}/configs/toy.yaml}}\nsamplers: {{a: {{sampler: best}}}}\n"
        "comparisons: [{sets: [mixed], seeds: 1, samplers: [a]}]\n"
    )
    with pytest.raises(UserError, match="--sampler best: must be one of"):
        read_plan(tmp_path / "plan.yaml", quick=False)


def test_what_is_done_is_not_run_again_and_what_fails_is_named(tmp_path, monkeypatch):
    """One failure must not cost the other runs, nor pass for a success."""
    monkeypatch.setattr(figures.toy, "locate", lambda name: name)
    done = Job("mixed", "done", 0, ["--no-such-option"], "toy-demo/model", steps=3)
    (tmp_path / "mixed-done-seed0").mkdir()
    (tmp_path / "mixed-done-seed0/metrics.jsonl").write_text('{"step": 3}\n')
    run_all([done], tmp_path, processes=1)
    (tmp_path / "mixed-done-seed0/metrics.jsonl").write_text('{"step": 2}\n')
    with pytest.raises(UserError, match="1 runs failed.*done-seed0.log: exit status 1.*no-such-option"):
        run_all([done], tmp_path, processes=1)


def test_unknown_options_of_the_script_are_refused():
    done = subprocess.run(
        [sys.executable, "-m", "experiments.figures", "--fast"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0 and "--fast" in done.stderr
