"""The scripts of bench/ on small sizes: do they run, and does the simulated engine keep to its own rules?"""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from ada.sampler import Prompt, exit_balance, exit_fixed, sample_adaptively
from bench import simulate, simulated
from bench.simulated import Engine, Grader

ROOT = Path(__file__).parents[1]


STEP_SEC = simulated.STEP_SEC + simulated.SEQUENCE_SEC  # with one running response


def run(engine, n_prompts, rule=exit_balance, *, round_size=8, max_rounds=4):
    prompts = [Prompt(row, "", [], None) for row in range(n_prompts)]
    options = dict(exit_rule=rule, n=4, round_size=round_size, max_rounds=max_rounds, seed=0, step=1)
    return sample_adaptively(engine, Grader(), iter(prompts), **options)


def test_one_response_alone_takes_its_tokens_and_a_prefill():
    """The unit of all simulated times, worked out by hand."""
    engine = Engine([0.5])
    [pool] = run(engine, 1, exit_fixed, round_size=1, max_rounds=1)
    overhead_sec = simulated.SUBMIT_SEC + simulated.PREFILL_SEC
    assert engine.time == pytest.approx(overhead_sec + len(pool.samples[0].tokens) * STEP_SEC)


def test_one_slot_generates_one_response_after_the_other():
    """Slots are respected: with one of them, times add up."""
    engine = Engine([0.5], slots=1)
    [pool] = run(engine, 1, exit_fixed, round_size=8, max_rounds=1)
    n_tokens = sum(len(sample.tokens) for sample in pool.samples)
    assert engine.time == pytest.approx(8 * simulated.SUBMIT_SEC + simulated.PREFILL_SEC + n_tokens * STEP_SEC)


@pytest.mark.parametrize("queue", [True, False])
@pytest.mark.parametrize("n_ranks", [1, 3])
def test_all_ways_draw_the_same_and_none_beats_the_bound(monkeypatch, n_ranks, queue):
    """A comparison of times between ways that sample different things would mean nothing."""
    monkeypatch.setattr(simulate, "PROMPTS", 60)
    rates = simulate.pass_rates("before RL")
    ours = simulate.ours(rates, n_ranks, slots=32, queue=queue)
    rounds = simulate.synchronous(rates, n_ranks, slots=32)
    assert ours.pools == rounds.pools == run(Engine(rates), 60)
    assert ours.bound < ours.seconds < rounds.seconds


def test_ranks_take_turns_in_the_order_of_time():
    """Otherwise the rank that happens to run first would empty the queue."""
    turns, order = simulated.Turns(), []

    def rank(name, times):
        for time in times:
            turns.wait_until(time)
            order.append((time, name))
        return name

    assert turns.run([lambda: rank("a", [1, 4, 5]), lambda: rank("b", [2, 3, 6])]) == ["a", "b"]
    assert order == [(1, "a"), (2, "b"), (3, "b"), (4, "a"), (5, "a"), (6, "b")]


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
    assert "a step, seconds: sampling" in result.stdout and "log-prob gap: mean" in result.stdout


@pytest.mark.slow
def test_sampling_and_step_scripts(toy_folder):
    """One turn of each."""
    for script in (["sampling.py", "toy"], ["step.py", "toy"]):
        command = [sys.executable, f"bench/{script[0]}", *script[1:], "--turns", "1"]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[-1].endswith(("x", "CPU seconds"))
