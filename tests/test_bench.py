"""The scripts of bench/ on small sizes: do they run, and does the simulated engine keep to its own rules?"""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from ada.sampler import exit_fixed
from bench import simulate
from bench.simulate import sample

ROOT = Path(__file__).parents[1]
STEP_SEC = simulate.STEP_SEC + simulate.SEQUENCE_SEC  # with one running response


def run(*command: str, timeout: int = 100) -> str:
    """What `python -m ...` printed."""
    result = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_one_response_alone_takes_its_tokens_and_a_prefill():
    """The unit of all simulated times, worked out by hand."""
    seconds, [pool] = sample("ours", [0.5], 1, rule=exit_fixed, shape=(1, 1))
    overhead_sec = simulate.SUBMIT_SEC + simulate.PREFILL_SEC
    assert seconds == pytest.approx(overhead_sec + pool.samples[0].n_tokens * STEP_SEC)


def test_one_slot_generates_one_response_after_the_other():
    """Slots are respected: with one of them, times add up."""
    seconds, [pool] = sample("ours", [0.5], 1, rule=exit_fixed, shape=(8, 1), slots=1)
    n_tokens = sum(response.n_tokens for response in pool.samples)
    assert seconds == pytest.approx(8 * simulate.SUBMIT_SEC + simulate.PREFILL_SEC + n_tokens * STEP_SEC)


@pytest.mark.parametrize("n_ranks", [1, 3])
def test_both_ways_draw_the_same_and_rounds_take_longer(n_ranks):
    """A comparison of times between ways that sample different things would mean nothing."""
    rates = simulate.pass_rates("before RL", 60)
    seconds, pools = sample("ours", rates, n_ranks, slots=32)
    seconds_of_rounds, pools_of_rounds = sample("rounds", rates, n_ranks, slots=32)
    assert pools == pools_of_rounds
    assert {len(pool.samples) for pool in pools} == {8, 16, 24, 32}
    work = sum(response.n_tokens for pool in pools for response in pool.samples) / (n_ranks * 32)
    assert work * (simulate.STEP_SEC + 32 * simulate.SEQUENCE_SEC) < seconds < seconds_of_rounds


def test_pass_rates_have_the_moments_they_were_fitted_to():
    """Fig. 2 of the paper; 20,000 prompts put the standard error of each below 0.004."""
    after = simulate.pass_rates("after RL", 20_000)
    assert sum(p**4 for p in after) / len(after) == pytest.approx(0.353, abs=0.015)
    assert sum(p**256 for p in after) / len(after) == pytest.approx(0.102, abs=0.015)
    rng = random.Random(0)
    kept = simulate.pass_rates("before RL", 20_000)
    drawn = [rng.betavariate(0.26, 0.72) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(0.265, abs=0.015)
    assert sum((1 - p) ** 256 for p in drawn) / len(drawn) == pytest.approx(0.187, abs=0.015)
    assert sum(kept) > sum(drawn)


def test_gpu_script_needs_no_vllm():
    """It is meant for machines without vLLM; no GPU is at hand to keep it working."""
    blocked = "import sys, runpy; sys.modules['vllm'] = None; sys.argv = ['gpu', '--tiny']; "
    code = blocked + "runpy.run_module('bench.gpu', run_name='__main__')"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert "tok/s" in result.stdout and "against fp32: mean" in result.stdout


@pytest.mark.slow
def test_update_script():
    """The plain way and ours, in fresh processes and in turn."""
    assert "x in memory" in run("bench.update", "--tiny")


@pytest.mark.slow
@pytest.mark.parametrize("script", ["sampling", "step"])
def test_sampling_and_step_scripts(toy_folder, script):
    """One turn of each."""
    output = run(f"bench.{script}", "--prompts_per_step", "8", "--turns", "1", timeout=300)
    assert "x in " in output.splitlines()[-1]
