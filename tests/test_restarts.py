"""Kills, crashes and restarts of the real command. Slow: every launch builds an engine."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
from commands import ROOT, read, torchrun
from test_train import NAME, TINY, launch, start, weights, without_clock

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("KILLS", 3))  # KILLS=20 for a longer siege
EVERY_STEP_SAVED = ("--steps=20", "--save_every=1", "--eval_every=5")


def start_torchrun(out, *options, script="train.py", ranks=2) -> subprocess.Popen:
    """From the command line, in a process group of its own."""
    arguments = [sys.executable, *torchrun(ranks), script, *TINY, f"--out={out}", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(arguments, cwd=ROOT, env=environment, start_new_session=True, text=True, **pipes)


def wait_until(condition, is_running, timeout=120):
    deadline = time.monotonic() + timeout
    while not condition():
        assert is_running(), "it ended early"
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.01)


def has_lines(path, count):
    return lambda: path.exists() and path.read_bytes().count(b"\n") >= count


def assert_same(folder, whole, step, *, exact):
    """Metrics but for the clock, all samples, weights: equal, or on other ranks up to the order of sums."""
    tolerance = dict(rel=0, abs=0) if exact else dict(rel=1e-4, abs=1e-5)
    pairs = zip(*(without_clock(read(path / "metrics.jsonl")) for path in (folder, whole)), strict=True)
    assert all(one == pytest.approx(other, **tolerance) for one, other in pairs)
    assert (folder / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    expected = weights(whole, step)
    largest = max((value - expected[name]).abs().max() for name, value in weights(folder, step).items())
    assert largest <= (0 if exact else 1e-4)


@pytest.mark.parametrize(("ranks", "kills"), [(1, KILLS), (2, 2)])
def test_kill_9_at_random_moments(ranks, kills, tmp_path, toy_folder):
    """Whatever it was doing, the same command goes on and ends with the files of an uninterrupted run."""
    assert launch(tmp_path / "whole", *EVERY_STEP_SAVED, ranks=ranks).returncode == 0
    folder, phase = tmp_path / "killed" / NAME, tmp_path / "phase"
    rng, phases = random.Random(0), []
    hooked = dict(script="tests/scripts/phases.py", ranks=ranks, environment={"PHASE_FILE": str(phase)})
    while len(phases) < kills:
        phase.unlink(missing_ok=True)
        command = start(folder.parent, *EVERY_STEP_SAVED, **hooked)
        in_the_loop = lambda: phase.exists() and phase.read_text() not in ("", "sync")  # noqa: E731
        wait_until(in_the_loop, command.is_running)
        time.sleep(rng.uniform(0, 1))
        target = ("sampling", "update", "saving", "between")[len(phases) % 4]
        while command.is_running() and phase.read_text() != target:
            pass
        time.sleep(rng.uniform(0, 0.03))
        if not command.is_running():  # it got to its end before the kill: begin anew
            shutil.rmtree(folder)
            continue
        command.signal(signal.SIGKILL)
        command.wait()
        phases.append(phase.read_text())
    print(f"killed in: {Counter(phases)}")
    assert launch(folder.parent, *EVERY_STEP_SAVED, ranks=ranks).returncode == 0
    assert_same(folder, tmp_path / "whole" / NAME, 20, exact=ranks == 1)


@pytest.fixture(scope="module")
def five_steps(tmp_path_factory, toy_folder):
    """On one rank."""
    out = tmp_path_factory.mktemp("five")
    assert launch(out, "--steps=5").returncode == 0
    return out / NAME


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1), (3, 3)])
def test_any_number_of_ranks_ends_where_one_does(first, second, tmp_path, five_steps):
    """A checkpoint belongs to no number of ranks: 2 steps on some, 3 on others."""
    assert launch(tmp_path, "--steps=2", ranks=first).returncode == 0
    assert launch(tmp_path, "--steps=5", ranks=second).returncode == 0
    assert_same(tmp_path / NAME, five_steps, 5, exact=False)


def test_resume_at_the_end_of_an_epoch(tmp_path, toy_folder):
    """1024 prompts, 512 a step: step 3 begins a new permutation, whether or not the run was stopped before it."""
    options = ("--prompts_per_step=512", "--log_prompts=512", "--sampler=grpo", "--eval_data=")
    assert launch(tmp_path / "one", "--steps=3", *options).returncode == 0
    for steps in ("--steps=2", "--steps=3"):
        assert launch(tmp_path / "two", steps, *options).returncode == 0
    one, two = ((tmp_path / name / "toy-grpo-seed0/samples.jsonl").read_text() for name in ("one", "two"))
    assert one == two


def test_an_exception_on_one_rank_ends_all(tmp_path, toy_folder):
    """With its message, within a minute, without a checkpoint of the broken step, without orphans."""
    process = start_torchrun(tmp_path, "--steps=9", "--save_every=1", script="tests/scripts/crash.py")
    wait_until(has_lines(tmp_path / NAME / "metrics.jsonl", 2), lambda: process.poll() is None)
    began = time.monotonic()
    _, stderr = process.communicate(timeout=90)
    assert time.monotonic() - began < 60
    assert process.returncode != 0 and "rank 1 has had enough" in stderr
    assert [path.name for path in (tmp_path / NAME / "checkpoints").iterdir()] == ["step-000001"]
    alive = subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True, text=True).stdout
    assert not alive, "left running"


@pytest.mark.parametrize("ctrl_c", [False, True])
def test_a_signal_to_torchrun_saves(ctrl_c, tmp_path, toy_folder):
    """torchrun passes SIGTERM on to its ranks, Ctrl-C reaches them twice; they agree on a step, save it and leave."""
    process, log = start_torchrun(tmp_path, "--steps=500"), tmp_path / NAME / "metrics.jsonl"
    wait_until(has_lines(log, 3), lambda: process.poll() is None)
    if ctrl_c:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    newest = max((log.parent / "checkpoints").iterdir())
    assert newest.name == f"step-{read(log)[-1]['step']:06d}"


def test_nothing_outlives_a_killed_run(tmp_path, toy_folder):
    """SIGKILL of the command alone: its graders, in sessions of their own, end by themselves."""
    command = start(tmp_path, "--steps=500")
    wait_until(has_lines(tmp_path / NAME / "metrics.jsonl", 3), command.is_running)
    [trainer] = command.processes
    graders = subprocess.run(["pgrep", "-P", str(trainer.pid)], capture_output=True, text=True).stdout.split()
    assert graders
    os.kill(trainer.pid, signal.SIGKILL)
    command.wait()
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in graders):
        assert time.monotonic() < deadline, "left running"
        time.sleep(0.2)


def test_a_full_disk_keeps_older_checkpoints(tmp_path, toy_folder):
    """One clear line, exit 1, nothing half-written; and with space again it goes on."""
    folder, options = tmp_path / NAME, ("--steps=4", "--save_every=2")
    assert launch(tmp_path, "--steps=2").returncode == 0
    done = launch(tmp_path, *options, script="tests/scripts/full_disk.py")
    assert done.returncode == 1
    assert "error: could not save" in done.stderr and "step-000004" in done.stderr and "Traceback" not in done.stderr
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000002"]
    assert launch(tmp_path, *options).returncode == 0
    assert [row["step"] for row in read(folder / "metrics.jsonl")] == [0, 1, 2, 3, 4]


def test_hostile_responses_hardly_slow_a_run(tmp_path, toy_folder):
    """5% of responses are towers, huge sums and broken text: all graded wrong, counted, within 1.3x of the time."""
    options = ("--steps=20", "--prompts_per_step=128", "--eval_data=", "--log_prompts=0")
    rows = {}
    for name, script in (("kind", "train.py"), ("hostile", "tests/scripts/hostile.py")):
        done = launch(tmp_path / name, *options, script=script)
        assert done.returncode == 0, done.stderr
        rows[name] = read(tmp_path / name / NAME / "metrics.jsonl")[1:]
    n_samples, seconds = (
        {name: sum(row[key] for row in rows[name]) for name in rows} for key in ("sampling/samples", "time/step")
    )
    failures = {
        key: sum(row[key] for row in rows["hostile"]) for key in rows["hostile"][0] if key.startswith("grading/")
    }
    print(f"{seconds} s, {n_samples} samples, {failures}")
    assert failures["grading/too_long"] > 0.005 * n_samples["hostile"]
    assert seconds["hostile"] / n_samples["hostile"] < 1.3 * seconds["kind"] / n_samples["kind"]
