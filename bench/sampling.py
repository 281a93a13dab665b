"""One sampling phase against the limit, vLLM alone, and against synchronous rounds.

    python bench/sampling.py toy                # 128 prompts, responses of some 8 tokens; half a minute on a CPU
    python bench/sampling.py long               # 32 prompts, responses of 1 to 500 tokens; four minutes

Each turn takes the prompts of one step (balance, 8 per round, at most 4 rounds) and times

  ours         `sample_adaptively` over the engine and the graders, as train.py calls it
  rounds       the same requests in synchronous rounds, as the paper's public code has it: all active prompts draw
               a round, all of it is generated, then graded, then the exit rule is asked; same engine, same graders
  the limit    vLLM alone on exactly those requests, all handed over at once, parameters made beforehand: nothing is
               decoded, graded or decided. That is what a sampler would need that knew all verdicts beforehand.

The three take turns on the same seeds, so they generate the same responses (checked). The toy's graders have seen the
task before, as in training after the first step. "long" is an untrained model of the toy's size whose responses end by
chance, on 64 places; verdicts are drawn by chance at the toy's pass rates, and each costs what math-verify costs. CPU
seconds are the process's own; on a machine with other work they are the steadier figure, but they do not see waiting.
Medians over the turns; ratios to the limit are printed last.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ada import toy
from ada.data import batch, load_prompts, load_tokenizer
from ada.engine import Engine
from ada.reward import Scorer
from ada.sampler import Pool, Prompt, Sample, by_row, exit_balance, sample_adaptively, seed_of
from ada.trainer import init_ranks
from bench.common import machine, random_model, spread

N, ROUND_SIZE, MAX_ROUNDS, SEED = 4, 8, 4, 0
SETTINGS = {
    "toy": dict(n_prompts=128, max_tokens=32, capacity=256, reward="math"),
    "long": dict(n_prompts=32, max_tokens=500, capacity=64, reward="bench.common:lucky"),
}


def ours(engine: Engine, scorer: Scorer, prompts: list[Prompt], step: int) -> list[Pool]:
    options = dict(exit_rule=exit_balance, n=N, round_size=ROUND_SIZE, max_rounds=MAX_ROUNDS, seed=SEED, step=step)
    return sample_adaptively(engine, scorer, iter(prompts), **options)


def synchronous_rounds(engine: Engine, scorer: Scorer, prompts: list[Prompt], step: int) -> list[Pool]:
    """Algorithm 1 to the letter: every prompt waits for the slowest response of the round, then for the graders."""
    pools = {prompt.row: Pool(prompt) for prompt in prompts}
    for _ in range(MAX_ROUNDS):
        active = [pool for pool in pools.values() if not pool.resolved]
        samples = {}
        for pool in active:
            row = pool.prompt.row
            for index in range(len(pool.samples), len(pool.samples) + ROUND_SIZE):
                engine.submit((row, index), pool.prompt.tokens, seed_of("train", SEED, step, row, index))
        while len(samples) < len(active) * ROUND_SIZE:
            for (row, index), tokens, logprobs, text, truncated in engine.poll():
                samples[row, index] = Sample(row, index, tokens, logprobs, text, truncated)
        for (row, index), sample in samples.items():
            scorer.submit((row, index), sample.text, pools[row].prompt.gold)
        n_graded = 0
        while n_graded < len(samples):
            for key, correct in scorer.poll(None):
                samples[key].correct = correct
                n_graded += 1
        for (row, _), sample in sorted(samples.items()):
            pools[row].samples.append(sample)
        for pool in active:
            pool.rounds += 1
            pool.resolved = exit_balance(pool, N)
    return sorted(pools.values(), key=by_row)


class Recorder:
    """Stands before vLLM's own engine and notes what it is asked for, so that it can be asked again."""

    def __init__(self, engine: Engine):
        self.core = engine.llm.llm_engine
        self.add_request, self.core.add_request = self.core.add_request, self.note
        self.requests = []

    def note(self, *request) -> None:
        self.requests.append(request)
        self.add_request(*request)

    def replay(self, requests: list[tuple]) -> dict[str, list[int]]:
        """vLLM alone on these requests, all at once: the tokens of each."""
        for request in requests:
            self.add_request(*request)
        tokens = {}
        while self.core.has_unfinished_requests():
            tokens |= {output.request_id: output.outputs[0].token_ids for output in self.core.step()}
        return tokens


def timed(function, *arguments):
    """(result, seconds, CPU seconds of this process)."""
    start, cpu = time.perf_counter(), time.process_time()
    result = function(*arguments)
    return result, time.perf_counter() - start, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=SETTINGS)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    turns, setting = arguments.turns, SETTINGS[arguments.setting]
    reward = setting["reward"]

    init_ranks()
    folder = toy.locate("toy-demo/model")
    if arguments.setting == "long":
        folder = random_model(tempfile.mkdtemp(), hidden=128, layers=2)
    rows, _ = load_prompts(
        toy.locate("toy-demo/train"), load_tokenizer(folder), max_prompt_tokens=32, whole_rows=reward != "math"
    )
    engine = Engine(folder, max_tokens=setting["max_tokens"], max_prompt_tokens=32, capacity=setting["capacity"])
    scorer = Scorer(reward=reward)
    scorer.wait_until_ready()
    print(machine())

    recorder = Recorder(engine)
    seconds, cpu_seconds = ({name: [] for name in ("ours", "rounds", "limit")} for _ in range(2))
    for turn in range(turns + 1):
        prompts = batch(rows, step=turn, size=setting["n_prompts"], seed=SEED)
        recorder.requests = []
        results = {}
        for name, way, *arguments in [
            ("rounds", synchronous_rounds, engine, scorer, prompts, turn),
            ("limit", recorder.replay, recorder.requests),
            ("ours", ours, engine, scorer, prompts, turn),
        ]:
            results[name], wall, cpu = timed(way, *arguments)
            engine.llm.reset_prefix_cache()
            if turn:  # the first warms up
                seconds[name].append(wall)
                cpu_seconds[name].append(cpu)
        pools, tokens = results["ours"], results["limit"]
        assert pools == results["rounds"], "the same seeds gave other pools"
        assert len(tokens) == sum(len(pool.samples) for pool in pools)
        assert all(tokens[f"{s.row}/{s.index}"] == s.tokens for pool in pools for s in pool.samples)
        print(f"turn {turn}: {len(tokens):,} responses, {sum(map(len, tokens.values())):,} tokens", flush=True)

    for name in seconds:
        print(f"{name:>8}: {spread(seconds[name])} s, {spread(cpu_seconds[name])} s of CPU")
    for name in ("rounds", "ours"):
        wall, cpu = (
            statistics.median(a / b for a, b in zip(times[name], times["limit"], strict=True))
            for times in (seconds, cpu_seconds)
        )
        print(f"{name} / limit: {wall:.2f}x, {cpu:.2f}x in CPU seconds")
    sys.stdout.flush()
    scorer.close()
    os._exit(0)


if __name__ == "__main__":
    main()
