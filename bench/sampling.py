"""One sampling phase against the limit, vLLM alone, and against synchronous rounds.

    python -m bench.sampling       # the toy: 128 prompts, responses of some 8 tokens; half a minute on a CPU
    python -m bench.sampling --model out/random-128x2 --reward bench.common:lucky --prompts_per_step 32 \\
        --max_response_tokens 500 --max_concurrent 64 --turns 3       # responses of 1 to 500 tokens; four minutes
    python -m bench.sampling --prompts_per_step 8 --turns 1           # the smallest

It takes train.py's options. Each turn samples the prompts of one step (balance, 8 per round, at most 4 rounds):

  ours            `sample_adaptively` over the engine and the graders, as train.py calls it
  rounds          synchronous rounds, as the paper's public code has it: all active prompts draw a round, all of it is
                  generated, then graded, then the exit rule is asked; same engine, same graders
  the limit       vLLM alone on exactly those requests, all handed over at once, parameters made beforehand: nothing is
                  decoded, graded or decided. That is what a sampler would need that knew all verdicts beforehand.
  sampler alone   `sample_adaptively` again, on an engine and graders that answer at once with what was drawn

They take turns on the same seeds, so they generate the same responses (checked). Verdicts of "lucky" are drawn by
chance at the toy's pass rates, and each costs what math-verify costs. CPU seconds are the process's own; on a machine
with other work they are the steadier figure, but they do not see waiting. The ratios are printed last.
"""

import sys

from ada import run_command
from ada.data import batch
from ada.engine import Engine
from ada.sampler import Pool, exit_balance, sample_adaptively
from ada.support.options import parse_options
from bench.common import BenchConfig, median, print_ratio, set_up, synchronous_rounds, take_turns


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


class Immediate:
    """Engine and graders in one: whatever is submitted, to either, comes back at the next poll."""

    capacity = 512

    def __init__(self, pools: list[Pool]):
        self.known = {(sample.prompt_id, sample.index): sample for pool in pools for sample in pool.samples}
        self.waiting = []

    def submit(self, key, *_) -> None:
        self.waiting.append(key)

    def poll(self, timeout="engine") -> list:
        keys, self.waiting = self.waiting, []
        return [self.known[key] if timeout == "engine" else (key, self.known[key].correct) for key in keys]


def main() -> None:
    config = parse_options(BenchConfig, sys.argv[1:])
    all_prompts, _, engine, scorer, _ = set_up(config)
    batches = [
        batch(all_prompts, step=turn, size=config.prompts_per_step, seed=config.seed)
        for turn in range(config.turns + 1)
    ]
    recorder, drawn = Recorder(engine), {}

    def rounds(turn: int) -> None:
        engine.llm.reset_prefix_cache()
        recorder.requests = []
        options = dict(exit_rule=exit_balance, step=turn)
        drawn["rounds"] = synchronous_rounds([engine], scorer, batches[turn], config, **options)

    def limit(turn: int) -> None:
        engine.llm.reset_prefix_cache()
        drawn["limit"] = recorder.replay(recorder.requests)

    def ours(turn: int) -> None:
        engine.llm.reset_prefix_cache()
        drawn["ours"] = sample_adaptively(engine, scorer, batches[turn], config, exit_rule=exit_balance, step=turn)

    def sampler_alone(turn: int) -> None:
        fakes = Immediate(drawn["ours"]), Immediate(drawn["ours"])
        drawn["alone"] = sample_adaptively(*fakes, batches[turn], config, exit_rule=exit_balance, step=turn)

    def check(turn: int) -> None:
        tokens = {f"{s.prompt_id}/{s.index}": s.tokens for pool in drawn["ours"] for s in pool.samples}
        assert drawn["ours"] == drawn["rounds"] == drawn["alone"] and tokens == drawn["limit"], "other responses"
        print(f"turn {turn}: {len(tokens):,} responses, {sum(map(len, tokens.values())):,} tokens", flush=True)

    ways = {"rounds": rounds, "the limit": limit, "ours": ours, "sampler alone": sampler_alone}
    records = take_turns(ways, config.turns, after_turn=check)
    for name in ways:
        seconds, cpu_seconds = (median(records, name, key) for key in ("seconds", "CPU seconds"))
        print(f"{name:>13}: {seconds:.3f} s, {cpu_seconds:.3f} s of CPU")
    print_ratio(records, "sampler alone", "ours", "seconds", "CPU seconds")
    for name in ("rounds", "ours"):
        print_ratio(records, name, "the limit", "seconds", "CPU seconds")
    scorer.close()


if __name__ == "__main__":
    run_command(main)
