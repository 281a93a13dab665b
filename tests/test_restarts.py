"""Kills, crashes and restarts of the real command. Slow: every launch builds an engine."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter

import pytest
from test_train import ROOT, command, launch, read, weights, without_clock

KILLS = int(os.environ.get("KILLS", 3))  # KILLS=20 for a longer siege
EVERY_STEP_SAVED = ("--steps=20", "--save_every=1", "--eval_every=5")


def start(out, *options, ranks=0):
    """The command in a process group of its own, so that one signal reaches every rank and grader."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command(out, *options, ranks=ranks),
        cwd=ROOT,
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )


def hooked(script, arguments):
    """The same command with one of tests/scripts, which runs train.py with a fault put into it."""
    return [f"tests/scripts/{script}" if argument == "train.py" else argument for argument in arguments]


def wait_until(condition, process, timeout=120):
    deadline = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, "it ended early"
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.01)


def wait_for_lines(path, count, process):
    wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") >= count, process)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "kills"), [(0, KILLS), (2, 2)])
def test_kill_9_at_random_moments(ranks, kills, tmp_path, toy_folder):
    """Whatever it was doing, the same command goes on and ends with the files of an uninterrupted run."""
    assert launch(tmp_path / "whole", *EVERY_STEP_SAVED, ranks=ranks).returncode == 0
    run, whole = tmp_path / "killed" / "toy-balance-seed0", tmp_path / "whole" / "toy-balance-seed0"
    rng, phases = random.Random(0), []
    arguments = hooked("phases.py", command(run.parent, *EVERY_STEP_SAVED, ranks=ranks))
    phase = tmp_path / "phase"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PHASE_FILE": str(phase)}
    while len(phases) < kills:
        phase.unlink(missing_ok=True)
        process = subprocess.Popen(
            arguments, cwd=ROOT, env=environment, start_new_session=True, stdout=subprocess.DEVNULL
        )
        wait_until(lambda: phase.exists() and phase.read_text() not in ("", "sync"), process)  # it is in the loop
        time.sleep(rng.uniform(0, 1))
        target = ("sampling", "update", "saving", "between")[len(phases) % 4]
        while process.poll() is None and phase.read_text() != target:
            pass
        time.sleep(rng.uniform(0, 0.03))
        if process.poll() is not None:  # it got to its end before the kill: begin anew
            shutil.rmtree(run)
            continue
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        phases.append(phase.read_text())
    print(f"killed in: {Counter(phases)}")
    assert launch(run.parent, *EVERY_STEP_SAVED, ranks=ranks).returncode == 0
    exact = dict(rel=0, abs=0) if ranks == 0 else dict(rel=1e-4, abs=1e-5)
    pairs = zip(*(without_clock(read(folder / "metrics.jsonl")) for folder in (run, whole)), strict=True)
    assert all(one == pytest.approx(other, **exact) for one, other in pairs)
    assert (run / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    tolerance = 0 if ranks == 0 else 1e-4
    expected = weights(whole, 20)
    assert all((value - expected[name]).abs().max() <= tolerance for name, value in weights(run, 20).items())


@pytest.mark.slow
def test_resume_on_another_number_of_ranks(tmp_path, toy_folder):
    """A checkpoint belongs to no number of ranks: 1 + 2 ranks and 2 + 1 ranks end where 1 rank ends."""
    assert launch(tmp_path / "one", "--steps=4").returncode == 0
    whole = tmp_path / "one" / "toy-balance-seed0"
    expected = weights(whole, 4)
    for name, first, second in (("grown", 1, 2), ("shrunk", 2, 1)):
        assert launch(tmp_path / name, "--steps=2", ranks=first).returncode == 0
        assert launch(tmp_path / name, "--steps=4", ranks=second).returncode == 0
        run = tmp_path / name / "toy-balance-seed0"
        assert (run / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
        for row, one in zip(*(without_clock(read(r / "metrics.jsonl")) for r in (run, whole)), strict=True):
            assert row == pytest.approx(one, rel=1e-5, abs=1e-5)
        assert all((value - expected[key]).abs().max() < 1e-5 for key, value in weights(run, 4).items())


@pytest.mark.slow
def test_resume_at_the_end_of_an_epoch(tmp_path, toy_folder):
    """1024 prompts, 512 a step: step 3 begins a new permutation, whether or not the run was stopped before it."""
    options = ("--prompts_per_step=512", "--log_prompts=512", "--sampler=grpo")
    assert launch(tmp_path / "one", "--steps=3", *options).returncode == 0
    for steps in ("--steps=2", "--steps=3"):
        assert launch(tmp_path / "two", steps, *options).returncode == 0
    one, two = ((tmp_path / name / "toy-grpo-seed0/samples.jsonl").read_text() for name in ("one", "two"))
    assert one == two


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_five_steps_on_several_ranks(ranks, tmp_path, toy_folder):
    """The groups are the same (samples.jsonl has all of them, with advantages); weights agree to the order of sums."""
    options = ("--steps=5", "--prompts_per_step=16", "--log_prompts=16")
    assert launch(tmp_path / "one", *options).returncode == 0
    assert launch(tmp_path / "many", *options, ranks=ranks).returncode == 0
    one, many = (tmp_path / name / "toy-balance-seed0" for name in ("one", "many"))
    assert (one / "samples.jsonl").read_text() == (many / "samples.jsonl").read_text()
    expected = weights(one, 5)
    assert all((value - expected[name]).abs().max() < 1e-4 for name, value in weights(many, 5).items())
    norms = [[row["update/grad_norm"] for row in read(run / "metrics.jsonl")[1:]] for run in (one, many)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.slow
def test_an_exception_on_one_rank_ends_all(tmp_path, toy_folder):
    """With its message, within a minute, without a checkpoint of the broken step, without orphans."""
    arguments = hooked("crash.py", command(tmp_path, "--steps=9", "--save_every=1", ranks=2))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        arguments,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    wait_for_lines(tmp_path / "toy-balance-seed0/metrics.jsonl", 2, process)
    began = time.monotonic()
    _, stderr = process.communicate(timeout=90)
    assert time.monotonic() - began < 60
    assert process.returncode != 0 and "rank 1 has had enough" in stderr
    checkpoints = tmp_path / "toy-balance-seed0" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000001"]
    alive = subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True, text=True).stdout
    assert not alive, "left running"


@pytest.mark.slow
def test_nothing_outlives_a_killed_run(tmp_path, toy_folder):
    """SIGKILL of the command alone: its graders end by themselves."""
    process = start(tmp_path, "--steps=500")
    wait_for_lines(tmp_path / "toy-balance-seed0/metrics.jsonl", 3, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 10
    while subprocess.run(["pgrep", "-s", str(process.pid)], capture_output=True).stdout:
        assert time.monotonic() < deadline, "left running"
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.parametrize("ctrl_c", [False, True])
def test_a_signal_to_torchrun_saves(ctrl_c, tmp_path, toy_folder):
    """torchrun passes SIGTERM on to its ranks, Ctrl-C reaches them twice; they agree on a step, save it and leave."""
    process = start(tmp_path, "--steps=500", ranks=2)
    log = tmp_path / "toy-balance-seed0/metrics.jsonl"
    wait_for_lines(log, 3, process)
    if ctrl_c:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGTERM)
    process.wait(60)
    newest = max((log.parent / "checkpoints").iterdir())
    assert newest.name == f"step-{read(log)[-1]['step']:06d}"


@pytest.mark.slow
def test_a_full_disk_keeps_older_checkpoints(tmp_path, toy_folder):
    """Files above a size are refused, as on a full disk: one clear line, exit 1, nothing half-written."""
    options = ("--steps=4", "--save_every=2")
    assert launch(tmp_path, "--steps=2", "--save_every=2").returncode == 0
    limited = ["bash", "-c", 'ulimit -f 600; trap "" XFSZ; exec "$@"', "bash", *command(tmp_path, *options)]
    done = subprocess.run(limited, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "error: could not save" in done.stderr and "step-000004" in done.stderr and "Traceback" not in done.stderr
    run = tmp_path / "toy-balance-seed0"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000002"]
    assert launch(tmp_path, *options).returncode == 0
    assert [row["step"] for row in read(run / "metrics.jsonl")] == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_hostile_responses_hardly_slow_a_run(tmp_path, toy_folder):
    """5% of responses are towers, huge sums and broken text: all graded wrong, counted, within 1.3x of the time."""
    options = ("--steps=40", "--prompts_per_step=128", "--eval_every=100", "--log_prompts=0")
    assert launch(tmp_path / "kind", *options).returncode == 0
    arguments = hooked("hostile.py", command(tmp_path / "hostile", *options))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    kind, hostile = (read(tmp_path / name / "toy-balance-seed0/metrics.jsonl")[1:] for name in ("kind", "hostile"))
    samples, hostile_samples = (sum(row["sampling/samples"] for row in rows) for rows in (kind, hostile))
    failures = {key: sum(row[key] for row in hostile) for key in hostile[0] if key.startswith("grading/")}
    seconds = [sum(row["time/step"] for row in rows) for rows in (kind, hostile)]
    print(f"{seconds[0]:.0f} s, with hostile responses {seconds[1]:.0f} s; {hostile_samples} samples, {failures}")
    assert failures["grading/too_long"] > 0.005 * hostile_samples
    assert seconds[1] / hostile_samples < 1.3 * seconds[0] / samples
