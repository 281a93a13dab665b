"""The real command, at a tiny size: real vLLM, real math-verify, real FSDP2, real files."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

import train
from ada.options import OptionError, parse_options

ROOT = Path(__file__).parent.parent
TINY = "--prompts_per_step 8 --eval_k 2 --eval_every 2 --save_every 2 --log_prompts 8".split()
FROM_THE_CLOCK = ("time/", "memory/")

FIXED_KEYS = """step reward/first_round reward/pool reward/kept policy/entropy
    sampling/samples sampling/tokens sampling/uniform_at_n sampling/uniform_after sampling/unresolved_no_right
    sampling/unresolved_no_wrong sampling/right_in_two_rounds sampling/resolved_in_two_rounds
    update/groups update/clip_high update/clip_low
    update/grad_norm engine/logprob_gap_max response/length response/truncated
    time/step time/sampling time/update time/sync""".split()


def command(out: Path, *options: str, ranks: int = 0) -> list[str]:
    """`python train.py` for ranks = 0, else torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*(torchrun if ranks else [sys.executable]), "train.py", *TINY, f"--out={out}", *options]


def launch(out: Path, *options: str, ranks: int = 0) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = command(out, *options, ranks=ranks)
    return subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_clock(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if not key.startswith(FROM_THE_CLOCK)} for row in rows]


def weights(run: Path, step: int) -> dict:
    return load_file(run / f"checkpoints/step-{step:06d}/hf/model.safetensors")


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory, toy_folder):
    """An uninterrupted run of 4 steps on one rank, and what it printed."""
    out = tmp_path_factory.mktemp("four")
    done = launch(out, "--steps=4")
    assert done.returncode == 0, done.stderr
    return out / "toy-balance-seed0", done.stdout


def test_it_writes_and_prints_what_it_promises(four_steps):
    run, printed = four_steps
    rows = read(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert {"eval/reward", "eval/pass@2"} <= rows[0].keys() & rows[2].keys() & rows[4].keys()
    for row in rows[1:]:
        assert set(FIXED_KEYS) <= row.keys()
        assert row["engine/logprob_gap_max"] is None or row["engine/logprob_gap_max"] < 1e-3
    samples = read(run / "samples.jsonl")
    assert {line["step"] for line in samples} == {1, 2, 3, 4}
    assert sum(line["step"] == 3 for line in samples) == rows[3]["sampling/samples"]
    assert sum(line["advantage"] is not None for line in samples if line["step"] == 3) == 4 * rows[3]["update/groups"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000002", "step-000004"]
    assert (run / "plot.png").stat().st_size > 10_000
    for words in ("<|assistant|>", "a response to ", "held out", "step 4", "step-000004", "plot.png"):
        assert words in printed


def test_weights_move(four_steps, toy_folder):
    run, _ = four_steps
    base, trained = load_file(toy_folder / "model" / "model.safetensors"), weights(run, 4)
    assert base.keys() == trained.keys()
    assert all((base[name] != trained[name]).any() for name in base)


def test_two_steps_and_two_more_are_four(four_steps, tmp_path):
    """Bit for bit, also where the last checkpoint was cut short and steps after the one before it had been logged."""
    run = tmp_path / "toy-balance-seed0"
    assert launch(tmp_path, "--steps=2").returncode == 0
    with (run / "metrics.jsonl").open("a") as log:
        log.write('{"step": 3, "reward/pool": 7}\n{"step": 4, "rew')
    (run / "checkpoints/step-000004.tmp/state").mkdir(parents=True)
    done = launch(tmp_path, "--steps=4")
    assert done.returncode == 0, done.stderr
    assert "continuing from" in done.stdout
    whole, _ = four_steps
    assert without_clock(read(run / "metrics.jsonl")) == without_clock(read(whole / "metrics.jsonl"))
    assert (run / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    expected = weights(whole, 4)
    assert all((value == expected[name]).all() for name, value in weights(run, 4).items())
    # after the last step there is nothing to do but to report
    again = launch(tmp_path, "--steps=4")
    assert again.returncode == 0 and "held out" in again.stdout
    assert without_clock(read(run / "metrics.jsonl")) == without_clock(read(whole / "metrics.jsonl"))


def test_two_ranks_do_what_one_does(four_steps, tmp_path):
    """The same responses, verdicts and groups; weights equal up to the order of sums."""
    done = launch(tmp_path, "--steps=2", ranks=2)
    assert done.returncode == 0, done.stderr
    run, (whole, _) = tmp_path / "toy-balance-seed0", four_steps
    expected = [line for line in read(whole / "samples.jsonl") if line["step"] <= 2]
    assert read(run / "samples.jsonl") == expected
    ours, theirs = (without_clock(read(folder / "metrics.jsonl")) for folder in (run, whole))
    for row, one in zip(ours, theirs[:3], strict=True):
        assert row == pytest.approx(one, rel=1e-4, abs=1e-5)
    one = weights(whole, 2)
    assert all((value - one[name]).abs().max() < 1e-4 for name, value in weights(run, 2).items())


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["passive", "two_stage"])
def test_the_baselines_do_on_two_ranks_what_they_do_on_one(sampler, tmp_path, toy_folder):
    """Waves and budgets are agreed upon over the real process group."""
    options = [f"--sampler={sampler}", "--steps=2"]
    for ranks in (0, 2):
        done = launch(tmp_path / str(ranks), *options, ranks=ranks)
        assert done.returncode == 0, done.stderr
    one, two = (tmp_path / str(ranks) / f"toy-{sampler}-seed0" for ranks in (0, 2))
    assert read(two / "samples.jsonl") == read(one / "samples.jsonl")
    ours, theirs = (without_clock(read(run / "metrics.jsonl")) for run in (two, one))
    for row, expected in zip(ours, theirs, strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_an_exit_rule_of_ones_own(tmp_path, toy_folder):
    """The way in for whoever has an idea: a function of the pool, named on the command line."""
    done = launch(tmp_path, "--sampler=experiments.rules:exit_signal", "--steps=1")
    assert done.returncode == 0, done.stderr
    row = read(tmp_path / "toy-exit_signal-seed0" / "metrics.jsonl")[1]
    assert row["update/groups"] == 8 - round(8 * row["sampling/uniform_after"])
    assert 8 * 8 <= row["sampling/samples"] < 8 * 32


def test_another_config_is_refused(four_steps):
    """Continuing a run with other options would mix two experiments in one log."""
    run, _ = four_steps
    before = (run / "metrics.jsonl").read_bytes(), (run / "config.json").read_bytes()
    done = launch(run.parent, "--steps=5", "--lr=1e-3", "--temperature=0.9")
    assert done.returncode == 1
    assert "lr was 0.0005, is 0.001" in done.stderr and "temperature was 1.0, is 0.9" in done.stderr
    assert "steps" not in done.stderr
    assert before == ((run / "metrics.jsonl").read_bytes(), (run / "config.json").read_bytes())


def test_sigterm_saves_and_the_same_command_continues(tmp_path, toy_folder):
    """A preempted job loses at most the step it is in."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command(tmp_path, "--steps=500"), cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    metrics = tmp_path / "toy-balance-seed0" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 4:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    last = read(metrics)[-1]["step"]
    newest = max((metrics.parent / "checkpoints").iterdir())
    assert newest.name == f"step-{last:06d}"


@pytest.fixture
def bad_files(tmp_path):
    (tmp_path / "columns.jsonl").write_text('{"problem": "1+1"}\n')
    (tmp_path / "broken.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n{"problem": \n')
    (tmp_path / "options.yaml").write_text("steps: 3\ncolour: red\n")
    (tmp_path / "list.yaml").write_text("steps: [1, 2]\n")
    (tmp_path / "value.yaml").write_text("steps: 3\nbaseline: best\n")
    (tmp_path / "prose.yaml").write_text("train it well\n")
    return tmp_path


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--group_size=33", "--group_size 33: --max_rounds 4 of --round_size 8 give only 32 responses"),
        ("--group_size=1", "--group_size 1: must be at least 2"),
        ("--sampler=best", "--sampler best: must be one of grpo, pos, balance, passive, two_stage, or MODULE:FUNCTION"),
        ("--sampler=nowhere:rule", "--sampler nowhere:rule: No module named 'nowhere'"),
        ("--sampler=ada.sampler:exit_best", "--sampler ada.sampler:exit_best: module 'ada.sampler' has no attribute"),
        ("--sampler=os:path", "--sampler os:path: not a function"),
        ("--sampler=os:", "--sampler os:: "),
        ("--baseline=best", "--baseline: invalid choice: 'best'"),
        ("--colour=red", "unknown option --colour"),
        ("--steps=many", "--steps: invalid int value: 'many'"),
        ("--eps_low=1.5", "--eps_low 1.5: must be below 1"),
        ("--temperature=0", "--temperature 0.0: must be above 0"),
        ("--lr=nan", "--lr nan: must be at least 0"),
        ("--config={folder}/options.yaml", "options.yaml:2: unknown option colour"),
        ("--config={folder}/list.yaml", "list.yaml:1: steps: must be a single value"),
        ("--config={folder}/value.yaml", "value.yaml:2: argument --baseline: invalid choice: 'best'"),
        ("--config={folder}/prose.yaml", "prose.yaml: must be lines of the form OPTION: VALUE"),
        ("--config={folder}/none.yaml", "none.yaml: No such file"),
    ],
)
def test_impossible_options_are_named(option, message, bad_files):
    with pytest.raises(OptionError) as refused:
        parse_options(train.Config, [option.format(folder=bad_files)])
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--sampler=two_stage --max_rounds=1", "--max_rounds 1: --sampler two_stage takes one for the pilot alone"),
        ("--sampler=two_stage --round_size=6", "--round_size 6: --sampler two_stage spends it in multiples of"),
        ("--sampler=passive --keep_uniform", "--keep_uniform: --sampler passive is about leaving them out"),
    ],
)
def test_options_that_do_not_go_together_are_named(options, message):
    with pytest.raises(OptionError, match=message):
        parse_options(train.Config, options.split())


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--colour=red", "unknown option --colour"),
        ("--model={folder}/nowhere", "nowhere"),
        ("--train_data={folder}/nowhere.jsonl", "nowhere.jsonl: no such file"),
        ("--train_data={folder}/columns.jsonl", "columns.jsonl: no answer column"),
        ("--train_data={folder}/broken.jsonl", "broken.jsonl:2: bad JSON"),
        ("--max_prompt_tokens=3", "no prompt left (max_prompt_tokens is 3)"),
        ("--prompts_per_step=5000", "a batch of 5000 prompts from 1024"),
        ("--max_response_tokens=100000", "max_prompt_tokens + max_response_tokens is 100032"),
        ("--wandb", "wandb is not installed"),
        ("--reward=best", "--reward best: must be math or MODULE:FUNCTION"),
    ],
)
def test_bad_input_is_one_clear_line(option, message, bad_files, toy_folder):
    """It names the option, file and line; the exit status is not 0; nothing is left behind."""
    done = launch(bad_files / "out", option.format(folder=bad_files))
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("[rank 0] error: ") and message in lines[0]
    assert not (bad_files / "out").exists()


def test_bad_input_under_torchrun(bad_files, toy_folder):
    """The line is there, of the first rank at least (torchrun then ends the others), and no traceback of ours."""
    done = launch(bad_files / "out", "--prompts_per_step=5000", ranks=2)
    assert done.returncode != 0
    assert re.search(r"\[rank [01]\] error: a batch of 5000 prompts from 1024", done.stderr), done.stderr
    assert 'train.py", line' not in done.stderr
    assert not (bad_files / "out").exists()


def test_options_from_yaml_and_command_line(tmp_path):
    """YAML first, command line on top; numbers in any notation; the run's name from both."""
    (tmp_path / "mine.yaml").write_text("lr: 1e-6\nsampler: pos\nnormalize_std: true\nseed: 3  # a remark\n")
    config = parse_options(
        train.Config, [f"--config={tmp_path / 'mine.yaml'}", "--seed", "4", "--keep-checkpoints", "1"]
    )
    assert (config.lr, config.sampler, config.normalize_std, config.seed) == (1e-6, "pos", True, 4)
    assert (config.keep_checkpoints, config.name) == (1, "mine-pos-seed4")


def test_grpo_is_one_round_of_the_group(tmp_path):
    config = parse_options(train.Config, ["--sampler=grpo", "--group_size=6"])
    assert (config.round_size, config.max_rounds) == (6, 1)


def test_every_config_is_valid():
    """The files in configs/ must not rot; toy.yaml says what the defaults are."""
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        if path.stem == "figures":  # a list of runs
            continue
        config = parse_options(train.Config, [f"--config={path}"])
        if path.stem == "toy":
            assert dataclasses.replace(config, config="") == parse_options(train.Config, [])


@pytest.mark.parametrize("command", ["train", "ada.prepare", "ada.eval"])
def test_commands_take_one_thread_unless_told_otherwise(command):
    """With as many OpenMP threads as cores beside a busy grader, or any neighbour, a command crawls."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    code = f"import {command}, torch; print(torch.get_num_threads())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr


def test_no_option_collides_with_torchrun():
    """torchrun reads the whole command line: an option that begins one of its own is "ambiguous" to it."""
    from torch.distributed.run import get_args_parser

    for option in dataclasses.fields(train.Config):
        arguments = ["train.py", f"--{option.name}", "1"]
        assert get_args_parser().parse_args(arguments).training_script_args == arguments[1:]
