"""From runs' logs to the tables in the pages, and the plan of the runs."""

import dataclasses
import json
import math
import re
import sys
from pathlib import Path

import pytest
import yaml
from matplotlib.figure import Figure

from ada import UserError
from experiments import figures, results, spurious
from experiments.figures import PLAN, read_plan, run_all
from experiments.results import at, make_tables, record_of, refresh, show
from train import Config

ROOT = Path(__file__).parent.parent


def line(step, prompt_id, index, response, *, problem="3+4-9", correct=True, advantage=None):
    prompt = f"<bos>{problem} Let's think<|assistant|>"
    values = (step, prompt_id, index, prompt, response, correct, advantage)
    return json.dumps(dict(zip("step prompt_id index prompt response correct advantage".split(), values, strict=True)))


@pytest.fixture
def run(tmp_path):
    """Two windows of two steps; 3+4-9 is 7, 8."""
    folder = tmp_path / "mixed-balance-seed0"
    folder.mkdir()
    data = tmp_path / "data.jsonl"
    data.write_text('{"problem": "3+4-9", "right_of_16": 2}\n')
    config = dataclasses.asdict(Config(prompts_per_step=2, train_data=str(data)))
    (folder / "config.json").write_text(json.dumps(config))
    evaluation = dict.fromkeys(results.EVALUATED, 0.5)
    rows = [{"step": 0, **evaluation, "eval/reward": 0.1}]
    for step in (1, 2, 3, 4):
        row = dict.fromkeys(results.MEANS, step / 10) | {"step": step, "update/groups": 1}
        row |= {"sampling/samples": 10 * step, "sampling/tokens": 80, "time/step": 0.5}
        rows.append(row | ({**evaluation, "eval/reward": 0.1 * step} if step % 2 == 0 else {}))
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
    record = record_of(run)
    assert [window["step"] for window in record["windows"]] == [0, 2, 4]
    assert [window["samples"] for window in record["windows"]] == [0, 30, 100]
    assert [window["groups"] for window in record["windows"]] == [0, 2, 4]
    assert [window["eval/reward"] for window in record["windows"]] == [0.1, 0.2, 0.4]
    assert [window.get("reward/first_round") for window in record["windows"]] == [None, 0.15, 0.35]


def test_spurious_answers_are_counted(run):
    """Right by the box, wrong by the chain; also under a reward that didn't pay for them."""
    counts = spurious.count_answers(run / "samples.jsonl", [0, 2, 4], {"3+4-9": 2})
    assert counts[0] == {}
    assert counts[2] == {"drawn 1-2": [10, 4, 2], "kept": [2, 2, 1], "kept 1-2": [2, 2, 1], "first": [6, 2, 1]}
    assert counts[4]["first"] == [2, 2, 0]
    assert spurious.count_answers(run / "samples.jsonl", [4], {"3+4-9": 3})[4]["drawn 3-8"] == [12, 6, 2]
    record = record_of(run)
    assert spurious.share_of_answers(record, "first", slice(0, 1)) == 0.5
    assert spurious.share_of_answers(record, "first", slice(0, 1), "all", "chains") == 1 / 6
    assert math.isnan(spurious.share_of_answers(record, "kept", slice(-1, None)))


def test_between_evaluations_in_a_straight_line(run):
    record = record_of(run)
    assert at(record, "eval/reward", "samples", 15) == pytest.approx(0.15)
    assert at(record, "eval/reward", "samples", 65) == pytest.approx(0.3)
    assert at(record, "eval/reward", "samples", 104) == pytest.approx(0.4)  # 4% beyond the end
    assert at(record, "eval/reward", "samples", 110) is None


def test_show():
    assert show([1.0]) == "1.0"
    assert show([1.0, None]) == ""
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
    made = make_tables(json.loads((ROOT / results.RESULTS).read_text()))
    for page in results.PAGES:
        text = (ROOT / page).read_text()
        assert "<!-- table: " in text
        copy = tmp_path / page.name
        copy.write_text(text)
        refresh(copy, made)
        assert copy.read_text() == text, page


# ----------------------------------------------------------------------------------------------------------------
# The plan


@pytest.fixture
def plan(tmp_path):
    """plan(**changes) writes a plan of one comparison and returns its path."""

    def write(**changes):
        comparison = {"sets": ["mixed"], "seeds": 1, "samplers": ["balance"]}
        whole = {
            "options": {},
            "sets": {"mixed": f"{ROOT}/configs/toy.yaml"},
            "samplers": {"balance": {"sampler": "balance"}, "best": {"sampler": "best"}},
            "comparisons": [comparison | changes, comparison],
        }
        (tmp_path / "plan.yaml").write_text(yaml.safe_dump(whole))
        return tmp_path / "plan.yaml"

    return write


def test_the_plan_has_what_is_compared():
    names = {job.name for job in read_plan(ROOT / PLAN, quick=False)}
    assert names >= {f"{s}-{name}-seed{i}" for s in ("mixed", "hard") for name in results.COMPARED for i in range(3)}
    assert names >= {f"mixed-{name}-seed{i}" for name in results.RULES for i in range(5)}


def test_quick_is_the_same_comparison_at_a_tenth_of_the_steps():
    jobs, quick = read_plan(ROOT / PLAN, quick=False), read_plan(ROOT / PLAN, quick=True)
    assert {job.name for job in quick} == {job.name for job in jobs if job.seed == 0}
    steps = {job.name: job.config.steps for job in jobs}
    assert all(job.config.steps == steps[job.name] // 10 for job in quick)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samplers": ["best"]}, "--sampler best: must be one of"),
        ({"samplers": ["pos"]}, "plan.yaml: KeyError: 'pos'"),
        ({"option": {}}, "plan.yaml: TypeError: .* 'option'"),
        ({"options": {"lr": 1e-3}}, "plan.yaml: two different runs are called mixed-balance-seed0"),
    ],
)
def test_a_bad_plan_is_one_clear_line(plan, changes, message):
    with pytest.raises(UserError, match=message):
        read_plan(plan(**changes), quick=False)


def test_what_two_comparisons_share_runs_once(plan):
    assert [job.name for job in read_plan(plan(), quick=False)] == ["mixed-balance-seed0"]


def test_what_is_done_is_not_run_again_and_what_fails_is_named(plan, tmp_path, monkeypatch):
    """One failure must not cost the other runs, nor pass for a success; other options are not the same run."""
    monkeypatch.setattr(figures.toy, "build_if_missing", lambda path: None)
    monkeypatch.setattr(sys, "executable", "echo")  # it ends well, and has trained nothing
    [job] = read_plan(plan(), quick=False)
    folder = tmp_path / job.name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(job.config)))
    (folder / "metrics.jsonl").write_text('{"step": 80}\n')
    run_all([job], tmp_path, processes=1)
    (folder / "metrics.jsonl").write_text('{"step": 79}\n')
    with pytest.raises(UserError, match="1 runs failed.*balance-seed0.log: exit status 0: train.py .*--seed=0 --out="):
        run_all([job], tmp_path, processes=1)
    job.config.lr = 1e-3
    with pytest.raises(UserError, match="lr was 0.0005, is 0.001"):
        run_all([job], tmp_path, processes=1)


def test_figures_and_tables_of_made_up_runs(tmp_path, monkeypatch):
    """The way from logs to files, which otherwise would break after an hour and a half of runs."""
    monkeypatch.setattr(figures, "write_method", lambda folder: None)  # has tests of its own
    monkeypatch.setattr(results, "base_rates", lambda data: {"3+4-9": 2})
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: path.touch())
    jobs = read_plan(ROOT / PLAN, quick=True)
    for i, job in enumerate(jobs):
        write_run(tmp_path / job.name, job.config, level=i / len(jobs))
    made = make_tables(figures.draw_figures(jobs, tmp_path, tmp_path / "plots"))
    drawn = {path.stem for path in (tmp_path / "plots").glob("*.png")}
    kinds = ("progress", "pass_at_k", "reward_entropy", "dynamics")
    assert drawn == {f"{kind}-toy-demo-{data}" for kind in kinds for data in ("train", "hard")} | {
        *("sets", "rules", "spurious"),
    }
    assert set(made) == set(re.findall("<!-- table: (.*?) -->", "".join((ROOT / p).read_text() for p in results.PAGES)))
    for table in made.values():
        assert len({row.count("|") for row in table.splitlines()}) == 1


def write_run(folder, config, level):
    """Logs as train.py would leave them, of 4 responses to each of 2 prompts a step."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    evaluation = {f"eval/{name}@{k}": level for name in ("pass", "all_right") for k in (1, 2, 4, 8, 16)}
    evaluation |= {"eval/reward": level, "eval/entropy": level, "eval/truncated": 0.0}
    rows = [{"step": 0, **evaluation}]
    for step in range(1, config.steps + 1):
        row = dict.fromkeys((*results.MEANS, *results.TOTALS.values()), 1.0) | {"step": step}
        rows.append(row | (evaluation if step % config.eval_every == 0 or step == config.steps else {}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    responses = [(r"7, 8, \boxed{8}", 0.5), (r"6, 8, \boxed{8}", 0.5), (r"1, 2, \boxed{2}", -0.5)]
    steps = range(1, config.steps + 1)
    lines = [line(step, 0, i, text, advantage=a) for step in steps for i, (text, a) in enumerate(responses)]
    (folder / "samples.jsonl").write_text("\n".join(lines) + "\n")
