"""What the figures show: seeds averaged, axes added up, sets told apart; files, and what is said of broken ones."""

import json
import re
import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments import plot
from experiments.curves import average, base_of, gain, make_lines, plain_grpo, read_run, series_of
from experiments.plot import finish, plot_all, plot_evaluations

CONFIG = {
    "model": "out/toy-demo/model",
    "train_data": "out/toy-demo/train.jsonl",
    "sampler": "balance",
    "group_size": 4,
    "round_size": 8,
    "max_rounds": 4,
    "prompts_per_step": 10,
    "baseline": "global",
    "normalize_std": False,
    "keep_zero_variance": False,
    "steps": 4,
}
GRPO = {"sampler": "grpo"}


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    """Most of the time would go into pixels."""
    monkeypatch.setitem(matplotlib.rcParams, "savefig.dpi", 30)


@pytest.fixture
def empty_files(monkeypatch):
    """Nearly all of it, where only names matter."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: path.touch())


def step(number, *, samples=80, seconds=2.0, **more):
    return {
        "step": number,
        "reward/first_round": 0.1 * number,
        "policy/entropy": 1.0,
        "sampling/samples": samples,
        "sampling/unresolved_no_right": 0.4,
        "sampling/unresolved_no_wrong": 0.2,
        "sampling/right_in_two_rounds": 0.5,
        "sampling/resolved_in_two_rounds": 0.3,
        "time/step": seconds,
        **more,
    }


def evaluation(reward, entropy=0.5, all_right=True):
    found = {"eval/reward": reward, "eval/entropy": entropy, "eval/pass@1": reward, "eval/pass@2": reward + 0.1}
    return found | ({"eval/all_right@1": reward, "eval/all_right@2": reward - 0.1} if all_right else {})


def rows_of(rewards, **options):
    """Step 0 and the steps after it, each with an evaluation."""
    first, *rest = (evaluation(reward) for reward in rewards)
    return [{"step": 0, **first}, *(step(i, **found, **options) for i, found in enumerate(rest, start=1))]


@pytest.fixture
def make(tmp_path):
    """make(name, rows, **config) writes a run's folder and returns it; the seed is the one in the name."""

    def write(name, rows, **config):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        seed = re.search(r"-seed(\d+)$", name)
        (folder / "config.json").write_text(json.dumps({**CONFIG, "seed": int(seed[1]) if seed else 0, **config}))
        return folder

    return write


def lines_of(*folders, labels=None):
    return make_lines([read_run(folder) for folder in folders], labels or {})


def numbers(points):
    """As lists, rounded."""
    return [part if part is None else [round(value, 9) for value in part.tolist()] for part in points]


# ----------------------------------------------------------------------------------------------------------------
# Series and averages


def test_samples_and_seconds_add_up(make):
    """Counted at the end of a step, nothing before the first; evaluations that come seldom keep their place."""
    rows = rows_of([0.2, 0.3])[:1] + [step(1, samples=40), step(2, samples=100, seconds=0.5, **evaluation(0.6))]
    run = read_run(make("a", rows))
    assert numbers(series_of(run, "eval/reward", "sampling/samples")) == [[0, 140], [0.2, 0.6]]
    assert numbers(series_of(run, "eval/reward", "time/step")) == [[0, 2.5], [0.2, 0.6]]
    assert numbers(series_of(run, "eval/reward")) == [[0, 2], [0.2, 0.6]]
    assert numbers(series_of(run, "reward/first_round", "sampling/samples")) == [[40, 140], [0.1, 0.2]]
    assert numbers(series_of(run, "per_prompt")) == [[1, 2], [4, 10]]  # of 10 prompts


def test_a_running_mean_is_centred_and_cut_off_at_the_ends(make):
    """One that trails would shift curves to the right; zeros beyond the ends would bend them down."""
    run = read_run(make("a", [step(i, value=value) for i, value in enumerate([0, 3, 6, 0, 1, 8], start=1)]))
    steps, values = series_of(run, "value", window=5)
    assert steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert values == pytest.approx([9 / 3, 9 / 4, 10 / 5, 18 / 5, 15 / 4, 9 / 3])


def test_what_was_not_measured_is_left_out(make):
    """reward/kept is null where no group was kept: neither 0 nor an error."""
    run = read_run(make("a", [step(1, value=1.0), step(2, value=None), step(3), step(4, value=3.0)]))
    assert numbers(series_of(run, "value")) == [[1, 4], [1, 3]]


def test_mean_and_standard_error_by_hand(make):
    """Over seeds: sd with n - 1, over the root of n. None with one seed: a band without width looks like certainty."""
    [line] = lines_of(*(make(f"a-seed{i}", rows_of([0.2, reward])) for i, reward in enumerate([0.3, 0.5, 0.7])))
    steps, mean, error = line.average("eval/reward")
    assert steps.tolist() == [0, 1]
    assert mean == pytest.approx([0.2, 0.5])
    assert error == pytest.approx([0, 0.2 / 3**0.5])
    [alone] = lines_of(make("b-seed0", rows_of([0.2, 0.3])))
    assert numbers(alone.average("eval/reward")) == [[0, 1], [0.2, 0.3], None]


def test_steps_end_with_the_shortest_run_and_are_those_of_all(make):
    """Beyond it the mean would jump as seeds drop out; between evaluations of one run there is nothing to average."""
    long = [{"step": 0, **evaluation(0.0)}, step(2, **evaluation(0.2)), step(4, **evaluation(0.4))]
    short = [{"step": 0, **evaluation(0.2)}, step(1, **evaluation(0.9)), step(2, **evaluation(0.4)), step(3)]
    [line] = lines_of(make("a-seed0", long), make("a-seed1", short))
    assert numbers(line.average("eval/reward")) == [[0, 2], [0.1, 0.3], [0.1, 0.1]]


def test_samples_are_interpolated_from_the_last_beginning_to_the_first_end():
    """By hand. A training metric is first known after the first step, at another number of samples for each seed."""
    series = [(np.array([0, 100, 200]), np.array([0, 0.2, 0.4])), (np.array([0, 50, 150]), np.array([0, 0.6, 1.2]))]
    xs, mean, error = average(series, shared=False)
    assert xs.tolist() == [0, 50, 100, 150]
    assert mean == pytest.approx([0, (0.1 + 0.6) / 2, (0.2 + 0.9) / 2, (0.3 + 1.2) / 2])
    assert error == pytest.approx([0, 0.25, 0.35, 0.45])
    series = [(np.array([10.0, 30.0]), np.array([1.0, 3.0])), (np.array([20.0, 40.0]), np.array([0.0, 6.0]))]
    assert numbers(average(series, shared=False)) == [[20, 30], [1.0, 3.0], [1.0, 0.0]]


def test_a_metric_that_one_seed_lacks_is_not_averaged(make):
    """An old run among new ones: the mean of the others would pass for the mean of all."""
    new, old = ([{"step": 0, **evaluation(0.2, all_right=flag)}] for flag in (True, False))
    [line] = lines_of(make("a-seed0", new), make("a-seed1", old))
    assert [len(part) for part in line.by_k("eval/all_right")[:2]] == [0, 0]
    assert numbers(line.by_k("eval/pass")) == [[1, 2], [0.2, 0.3], [0, 0]]


def test_pass_at_k_is_that_of_the_last_evaluation_of_all_seeds(make):
    """k in numeric order (10 comes before 2 in a text), at the step that the shortest run got to."""
    more = {"eval/pass@16": 0.9, "eval/pass@4": 0.8}
    long = [
        {"step": 0, **evaluation(0.1), **more},
        step(1, **evaluation(0.3), **more),
        step(2, **evaluation(0.7), **more),
    ]
    [line] = lines_of(make("a-seed0", long), make("a-seed1", [*long[:1], step(1, **evaluation(0.5), **more)]))
    assert numbers(line.by_k("eval/pass"))[:2] == [[1, 2, 4, 16], [0.4, 0.5, 0.8, 0.9]]


# ----------------------------------------------------------------------------------------------------------------
# Lines


def test_runs_that_differ_in_their_seed_are_one_line(make):
    """And only in a trailing -seedN: another name, or the same on other prompts, is another line."""
    rows = rows_of([0.2, 0.3])
    names = "toy-balance-seed0 toy-grpo-seed0 toy-balance-seed12 toy-seed1-pos x/toy-balance-seed0".split()
    sets = [CONFIG["train_data"]] * 4 + ["out/hard.jsonl"]
    lines = lines_of(*(make(name, rows, train_data=data) for name, data in zip(names, sets, strict=True)))
    assert [(line.label, line.data, len(line.runs)) for line in lines] == [
        ("toy-balance", "toy-demo-train", 2),
        ("toy-grpo", "toy-demo-train", 1),
        ("toy-seed1-pos", "toy-demo-train", 1),
        ("toy-balance", "out-hard", 1),
    ]


def test_the_same_sampler_looks_the_same_on_every_set(make):
    """And two lines of one set never look the same, even where only the learning rate differs."""
    rows, hard = rows_of([0.2, 0.3]), {"train_data": "hard.jsonl"}
    folders = [
        make("a", rows),
        make("a-other-lr", rows),
        make("b", rows, **GRPO),
        make("hard-b", rows, **GRPO, **hard),
        make("hard-c", rows, sampler="pos", **hard),
        make("hard-a", rows, **hard),
    ]
    assert [line.style for line in lines_of(*folders)] == [0, 1, 2, 2, 3, 0]
    named = lines_of(*folders, labels={"b": "GRPO", "hard-c": "GRPO"})
    assert [(line.label, line.style) for line in named][2:5] == [("GRPO", 2), ("hard-b", 3), ("GRPO", 2)]


@pytest.mark.parametrize("other", [{"seed": 0}, {"group_size": 8}, {"sampler": "pos"}])
def test_a_line_is_one_method_and_each_seed_once(make, other):
    """The same run twice would halve the error; a mean over two methods means nothing."""
    folders = make("x/a", rows_of([0.2, 0.3])), make("y/a", rows_of([0.2, 0.3]), **{"seed": 1, **other})
    with pytest.raises(ValueError, match="x/a, .*y/a: one line, going by their names, but not one method"):
        lines_of(*folders)


def test_options_under_their_old_names_are_the_same_method(make):
    """Runs from before the options were renamed, drawn beside new ones."""
    old = {"model": "toy-demo/model", "train_data": "toy-demo/train", "keep_uniform": False}
    rows = rows_of([0.2, 0.3])
    folders = [make("grpo-seed0", rows, **GRPO), make("grpo-seed1", rows, **GRPO, **old, round_size=4, max_rounds=1)]
    folders += [make("p-seed0", rows, sampler="passive", **old)]
    folders += [make("p-seed1", rows, sampler="experiments.baselines:passive")]
    assert [(line.label, line.data, len(line.runs)) for line in lines_of(*folders)] == [
        ("grpo", "toy-demo-train", 2),
        ("p", "toy-demo-train", 2),
    ]


def test_two_models_on_the_same_prompts_are_not_mixed(make):
    """There is one base model in a figure; another one's runs would be measured against it."""
    runs = [make("a-seed0", rows_of([0.1, 0.2])), make("b-seed0", rows_of([0.5, 0.6]), model="other/model")]
    with pytest.raises(ValueError, match="b-seed0: trained other/model, others out/toy-demo/model"):
        lines_of(*runs)


def test_the_base_model_is_step_0_of_each_seed_once(make):
    """All samplers share it; counted once for each, its error would come out too small."""
    folders = [make(f"{name}-seed{i}", rows_of([0.2 + 0.2 * i, 0.9])) for name in "abc" for i in range(2)]
    assert numbers(base_of(lines_of(*folders)).average("eval/reward")) == [[0], [0.3], [0.1]]


def test_gain_is_over_plain_grpo(make):
    """Not over GRPO with the std, nor with larger groups or more steps; errors of independent means add in squares."""
    folders = [
        make("std", rows_of([0.2, 0.9]), **GRPO, normalize_std=True),
        make("large", rows_of([0.2, 0.9]), **{**GRPO, "group_size": 16}),
        make("long", rows_of([0.2, 0.9]), **GRPO, steps=40),
        *(make(f"grpo-seed{i}", rows_of([0.2, reward, 0.5]), **GRPO) for i, reward in enumerate([0.2, 0.4])),
        *(make(f"balance-seed{i}", rows_of([0.2, reward])) for i, reward in enumerate([0.4, 0.8])),
    ]
    lines = lines_of(*folders)
    baseline = plain_grpo(lines)
    assert baseline.label == "grpo"
    assert numbers(gain(lines[-1], baseline, "eval/reward")) == [[0, 1], [0, 0.3], [0, round(0.05**0.5, 9)]]
    assert plain_grpo(lines[:1]) is None


# ----------------------------------------------------------------------------------------------------------------
# Figures

FIGURES = ["progress", "pass_at_k", "reward_entropy", "dynamics"]


def test_files_of_one_set(make, tmp_path, monkeypatch, capsys):
    """One of each, and what the command prints is what is there."""
    folders = [str(make(f"{name}-seed{i}", rows_of([0.2, 0.3, 0.5]))) for name in ("a", "b") for i in range(2)]
    monkeypatch.setattr(sys, "argv", ["plot", *folders, "--out", str(tmp_path / "new" / "plots")])
    plot.main()
    written = [tmp_path / "new" / "plots" / f"{name}.png" for name in FIGURES]
    assert capsys.readouterr().out.splitlines() == list(map(str, written))
    assert sorted((tmp_path / "new" / "plots").iterdir()) == sorted(written)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_files_of_two_sets(make, tmp_path, empty_files):
    """Curves of different training prompts do not belong in one panel."""
    for prefix, data in (("", CONFIG["train_data"]), ("hard-", "out/x/hard.jsonl")):
        make(f"{prefix}grpo", rows_of([0.2, 0.3]), **GRPO, train_data=data)
        make(f"{prefix}pos", rows_of([0.2, 0.4]), sampler="pos", train_data=data)
    folders = [tmp_path / name for name in ("grpo", "pos", "hard-grpo", "hard-pos")]
    names = [f"{name}-{data}.png" for data in ("toy-demo-train", "x-hard") for name in FIGURES]
    assert [path.name for path in plot_all(folders, tmp_path / "plots")] == [*names, "sets.png"]
    without_grpo = [path.name for path in plot_all([tmp_path / "pos", tmp_path / "hard-pos"], tmp_path / "plots")]
    assert without_grpo == names


def test_sets_leave_out_longer_runs_of_the_baseline(make):
    """Their gain over it is 0 as far as it goes."""
    lines = lines_of(
        make("grpo", rows_of([0.2, 0.3]), **GRPO),
        make("grpo-long", rows_of([0.2, 0.3, 0.4]), **GRPO, steps=40),
        make("pos", rows_of([0.2, 0.4]), sampler="pos"),
    )
    [axis] = plot.sets_figure({"one": lines}).axes
    assert [line.get_label() for line in axis.lines] == ["grpo", "pos"]


def test_a_run_that_has_just_begun_and_one_without_evaluation(make, tmp_path, empty_files):
    """The base model's evaluation, no dynamics; and with --eval_data "" no Pass@k, but reward and entropy there are."""
    begun = [make("a-seed0", rows_of([0.2])), make("b-seed0", rows_of([0.2]), **GRPO)]
    assert [path.stem for path in plot_all(begun, tmp_path)] == ["progress", "pass_at_k", "reward_entropy"]
    folder = make("a", [{"step": 0}, *(step(i) for i in range(1, 8))])
    assert [path.stem for path in plot_all([folder], tmp_path)] == ["progress", "dynamics"]
    figure = plot.progress_figure(lines_of(folder))
    assert [[(line.get_label(), len(line.get_xdata())) for line in axis.lines] for axis in figure.axes] == [
        [("a", 7)]
    ] * 6
    assert figure.axes[0].get_ylabel() == "training reward\nrunning mean over 5 steps"


def test_progress_has_reward_and_entropy_against_three_axes(make):
    """Which panel shows what: the ends of the line tell."""
    figure = plot.progress_figure(lines_of(make("a", rows_of([0.2, 0.3, 0.5], samples=50, seconds=1.5))))
    ends = [(axis.lines[0].get_xdata()[-1], axis.lines[0].get_ydata()[-1]) for axis in figure.axes]
    assert ends == [(2, 0.5), (100, 0.5), (3.0, 0.5)] * 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a"]


def test_pass_at_k_shows_base_and_end(make):
    """The base dashed on the left; on the right all wrong dashed, 1 - pass@k; old runs without all right still show."""
    figure = plot.pass_at_k_figure(lines_of(make("a", rows_of([0.2, 0.4])), make("b", rows_of([0.2, 0.6]), **GRPO)))
    left, right = figure.axes
    assert [(line.get_label(), line.get_linestyle()) for line in left.lines] == [
        ("before training (step 0)", "--"),
        ("a (step 1)", "-"),
        ("b (step 1)", "-"),
    ]
    assert [line.get_ydata().tolist() for line in left.lines] == [pytest.approx([r, r + 0.1]) for r in (0.2, 0.4, 0.6)]
    assert [(line.get_linestyle(), *line.get_ydata()) for line in right.lines[2:4]] == [
        ("-", 0.4, pytest.approx(0.3)),
        ("--", 0.6, pytest.approx(0.5)),
    ]
    old = plot.pass_at_k_figure(lines_of(make("old", [{"step": 0, **evaluation(0.2, all_right=False)}])))
    assert [line.get_linestyle() for line in old.axes[1].lines] == ["--", "--"]


def test_only_samplers_in_rounds_are_resolved_or_not(make):
    """GRPO, passive filtering and two stages have no exit rule: lines at 0 would read as a success of theirs."""
    rows = rows_of([0.2, 0.3, 0.4])
    folders = [make("grpo", rows, **GRPO), make("balance", rows), make("own", rows, sampler="my_rules:own")]
    folders += [make(name, rows, sampler=name) for name in ("passive", "two_stage")]
    folders.append(make("once", rows, max_rounds=1))
    figure = plot.dynamics_figure(lines_of(*folders))
    assert [[line.get_label() for line in axis.lines] for axis in figure.axes] == [
        ["grpo", "balance", "own", "passive", "two_stage", "once"],
        ["balance", "own"] * 2,
        ["balance", "own"] * 2,
    ]
    assert [[line.get_ydata()[0] for line in axis.lines[::2]] for axis in figure.axes[1:]] == [[0.4, 0.2], [0.5, 0.3]]
    assert len(plot.dynamics_figure(lines_of(folders[0])).axes) == 1


def test_a_long_run_does_not_squeeze_the_others(make):
    """GRPO run for as many samples as the others take has many times their steps."""
    folders = [make(name, rows_of([0.2, 0.3, 0.4])) for name in "ab"] + [make("long", rows_of([0.2] * 9))]
    figure = plot.progress_figure(lines_of(*folders))
    assert [axis.get_xlim()[1] > 8 for axis in figure.axes[:3]] == [False, True, True]
    assert figure.axes[3].get_xlabel() == "step\nthe longest line goes on to 8"


# ----------------------------------------------------------------------------------------------------------------
# Broken input


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda run: (run / "metrics.jsonl").unlink(), "a-seed1/metrics.jsonl: no such file"),
        (lambda run: (run / "config.json").unlink(), "a-seed1/config.json: no such file"),
        (lambda run: (run / "metrics.jsonl").write_text(""), "a-seed1/metrics.jsonl: empty"),
        (lambda run: (run / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1, "ti'), "a-seed1/metrics.jsonl:2: "),
        (lambda run: (run / "metrics.jsonl").write_text("[1]\n"), "a-seed1/metrics.jsonl:1: not an object with a step"),
        (lambda run: (run / "metrics.jsonl").write_text('{"step": 3}\n' * 2), "metrics.jsonl:2: step 3 after step 3"),
        (lambda run: (run / "config.json").write_text('{"seed": '), "a-seed1/config.json: "),
        (lambda run: (run / "config.json").write_text('{"seed": 0}'), "a-seed1/config.json: no model, train_data, "),
    ],
)
def test_broken_input_is_one_line_and_nothing_is_written(make, tmp_path, monkeypatch, capsys, spoil, message):
    """The second of two runs: the first one's figures must not be there either."""
    folders = [make(f"a-seed{i}", rows_of([0.2, 0.3])) for i in range(2)]
    spoil(folders[1])
    monkeypatch.setattr(sys, "argv", ["plot", *map(str, folders), "--out", str(tmp_path / "plots")])
    with pytest.raises(SystemExit) as stop:
        plot.main()
    assert stop.value.code.startswith("error: ") and message in stop.value.code and "\n" not in stop.value.code
    assert not (tmp_path / "plots").exists()


def test_nothing_to_draw_is_said(make, tmp_path):
    """An evaluation turned off and no step yet; no figure without a word would look like a fault."""
    with pytest.raises(ValueError, match="no step and no evaluation, nothing to draw"):
        plot_all([make("a", [{"step": 0}])], tmp_path / "plots")
    assert not (tmp_path / "plots").exists()


# ----------------------------------------------------------------------------------------------------------------
# Evaluations


def test_an_evaluation_is_drawn_from_its_results(tmp_path, monkeypatch, empty_files):
    """A row of panels for each data set, and a model looks the same in all of them."""
    results = [
        {"model": model, "data": data, "pass": {"1": 0.2, "2": 0.3}, "all_right": {"1": 0.2, "2": 0.1}}
        for model in ("base", "trained")
        for data in ("math500", "aime-like")
    ]
    (tmp_path / "results.json").write_text(json.dumps(results))
    drawn = []
    monkeypatch.setattr(plot, "finish", lambda figure: drawn.append(figure) or finish(figure))
    assert plot_evaluations([tmp_path / "results.json"], tmp_path / "new") == [tmp_path / "new" / "pass_at_k.png"]
    axes = drawn[0].axes
    assert [axis.get_title().partition("\n")[0] for axis in axes] == ["math500"] * 2 + ["aime-like"] * 2
    assert [[line.get_label() for line in axis.lines] for axis in axes[::2]] == [["base", "trained"]] * 2
    assert axes[0].lines[1].get_color() == axes[2].lines[1].get_color() != axes[0].lines[0].get_color()
    assert [line.get_ydata().tolist() for line in axes[1].lines[:2]] == [[0.2, 0.1], [0.8, 0.7]]


@pytest.mark.parametrize("content", ['[{"model": "m", "data": "d"}]', '{"error": 1}', "[1]", "{"])
def test_what_are_no_results_is_said(content, tmp_path, monkeypatch):
    (tmp_path / "results.json").write_text(content)
    monkeypatch.setattr(sys, "argv", ["plot", str(tmp_path / "results.json"), "--out", str(tmp_path / "new")])
    with pytest.raises(SystemExit, match="error: .*results.json: not results of scripts/evaluate.py"):
        plot.main()
    assert not (tmp_path / "new").exists()
