"""The scripts of bench/ on small sizes: do they run, and does the simulated engine keep to its own rules?"""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from ada.sampler import Prompt, exit_balance, exit_fixed, sample_adaptively
from bench import overhead, simulate, simulated
from bench.simulated import Engine, Grader

ROOT = Path(__file__).parents[1]


def run(engine, prompts, rule=exit_balance, *, round_size=8, max_rounds=4):
    options = dict(exit_rule=rule, n=4, round_size=round_size, max_rounds=max_rounds, seed=0, step=1)
    return sample_adaptively(engine, Grader(), iter(prompts), **options)


def prompts_of(n):
    return [Prompt(row, "", [], None) for row in range(n)]


def test_one_response_alone_takes_its_tokens_and_a_prefill():
    """The unit of all simulated times, worked out by hand."""
    engine = Engine([0.5])
    [pool] = run(engine, prompts_of(1), exit_fixed, round_size=1, max_rounds=1)
    n_tokens = len(pool.samples[0].tokens)
    step_sec = simulated.STEP_SEC + simulated.SEQUENCE_SEC
    assert engine.now == pytest.approx(simulated.PREFILL_SEC + n_tokens * step_sec)


def test_one_slot_generates_one_response_after_the_other():
    """Slots are respected: with one of them, times add up."""
    engine = Engine([0.5], slots=1)
    run(engine, prompts_of(1), exit_fixed, round_size=8, max_rounds=1)
    step_sec = simulated.STEP_SEC + simulated.SEQUENCE_SEC
    assert engine.now == pytest.approx(simulated.PREFILL_SEC + engine.n_tokens * step_sec)


@pytest.mark.parametrize("n_ranks", [1, 3])
@pytest.mark.parametrize("look_ahead", [1, 4])
def test_no_way_to_route_changes_what_is_sampled_or_beats_the_bound(n_ranks, look_ahead):
    """Neither ranks nor the order of completion may change a pool; no schedule is faster than full engines."""
    rates = simulated.pass_rates("before RL", 40)
    engine = Engine(rates, n_ranks, look_ahead=look_ahead, slots=16)
    pools = run(engine, prompts_of(40))
    assert pools == run(Engine(rates, 1, slots=500), prompts_of(40))
    assert engine.now >= engine.lower_bound
    assert not any(rank.in_flight for rank in engine.ranks)
    assert all(sample.correct == (sample.text == "right") for pool in pools for sample in pool.samples)


def test_synchronous_rounds_draw_the_same_responses(monkeypatch):
    """A comparison of times between ways that sample different things would mean nothing."""
    monkeypatch.setattr(simulate, "PROMPTS", 60)
    rates = simulate.pass_rates("before RL")
    ours, rounds = simulate.ours(rates, 2, slots=32), simulate.synchronous(rates, 2, slots=32)
    assert ours.responses == rounds.responses
    assert ours.bound < ours.seconds < rounds.seconds


def test_pass_rates_have_the_moments_they_were_fitted_to():
    """Fig. 2 of the paper; 20,000 prompts put the standard error of each below 0.004."""
    after = simulated.pass_rates("after RL", 20_000)
    assert sum(p**4 for p in after) / len(after) == pytest.approx(0.353, abs=0.015)
    assert sum(p**256 for p in after) / len(after) == pytest.approx(0.102, abs=0.015)
    rng = random.Random(0)
    kept = simulated.pass_rates("before RL", 20_000)
    drawn = [rng.betavariate(0.26, 0.72) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(0.265, abs=0.015)
    assert sum((1 - p) ** 256 for p in drawn) / len(drawn) == pytest.approx(0.187, abs=0.015)
    assert sum(kept) > sum(drawn)


def test_the_sampler_stays_cheap():
    """The goal is 20 us a response; a quadratic slip in the loop would be far above. Best of three, in CPU time."""
    seconds = min(overhead.sampler_seconds(512) for _ in range(3))
    assert seconds / (512 * 32) < 20e-6


def test_gpu_script_without_vllm():
    """The part that runs where vLLM isn't installed, on the CPU: no GPU is at hand to keep it working."""
    command = [sys.executable, "bench/gpu.py", "--tiny", "--no_engine"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert "tok/s" in result.stdout and "against fp32: mean" in result.stdout


def test_gpu_script_with_vllm():
    """Sleep, wake, sync and one full step."""
    result = subprocess.run(
        [sys.executable, "bench/gpu.py", "--tiny"], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    assert "step 2, seconds: sampling" in result.stdout and "log-prob gap: mean" in result.stdout


@pytest.mark.slow
def test_sampling_and_step_scripts(toy_folder):
    """One turn of each."""
    for script in (["sampling.py"], ["step.py", "toy"]):
        command = [sys.executable, f"bench/{script[0]}", *script[1:], "--turns", "1"]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[-1].endswith(("x", "CPU seconds"))
