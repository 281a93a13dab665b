"""Our `grpo` against TRL's GRPOTrainer: seconds per step, generation and training apart, and peak memory.

    python3.11 -m venv ../trl-venv      # outside of the repository; a CPU torch first, as in the README
    ../trl-venv/bin/pip install -r bench/requirements-trl.txt
    python -m bench.trl --trl_python ../trl-venv/bin/python            # the toy; the smallest: --prompts_per_step 8
    python -m bench.trl --trl_python ../trl-venv/bin/python --model out/random-512x8x32768 --prompts_per_step 8 \\
        --max_response_tokens 500 --micro_batch_tokens 4096 --trl_rows 8 --turns 3       # 42 M parameters

It takes train.py's options, --model among them. Both sides: the same model and prompts, temperature 1, fp32, one
thread, one step of AdamW per batch, token mean, advantages against the group's mean, no KL. They take steps in turn.
TRL, in a process of its own, generates with transformers (one padded batch until the longest response ends) and pads
the update's sequences to the longest of the batch. The ratios are printed last.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace

from ada import option, run_command
from ada.data import load_prompts, load_tokenizer
from ada.support.options import parse_options
from bench.common import BenchConfig, batches_of, print_medians, print_ratio, resident_mib, set_up, take_turns
from bench.step import one_step


@dataclass
class RaceConfig(BenchConfig):
    trl_python: str = option("", "python of the virtual environment with TRL; without it, this is TRL's side")
    trl_rows: int = option(512, "sequences per micro-batch of TRL; a step has a multiple of them", at_least=1)


def race(config: RaceConfig) -> None:
    config = replace(config, lr=1e-7, keep_zero_variance=True)  # TRL trains on such groups, too
    batches, *parts = set_up(config)
    command = [config.trl_python, "-m", "bench.trl", *sys.argv[1:], "--trl_python="]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ours(turn: int) -> dict[str, float]:
        metrics = one_step("grpo", turn, config, batches[turn], *parts)
        keys = {"step": "time/step", "generation": "time/sampling", "tokens": "sampling/tokens"}
        return {name: metrics[key] for name, key in keys.items()} | {"peak MiB": resident_mib("VmHWM")}

    def trl(turn: int) -> dict[str, float]:
        child.stdin.write("step\n")
        child.stdin.flush()
        return json.loads(child.stdout.readline())

    records = take_turns({"ours": ours, "trl": trl}, config.turns)
    print_medians(records)
    print_ratio(records, "trl", "ours", *records["trl"][0])


def trl_side(config: RaceConfig) -> None:
    """A step for each line of standard input, and its figures on standard output."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print
    tokenizer = load_tokenizer(config.model)
    prompts, _ = load_prompts(config.train_data, tokenizer, config)
    ordered = sum(batches_of(prompts, config), [])
    dataset = Dataset.from_list([{"prompt": prompt.text, "gold": prompt.gold} for prompt in ordered])
    record = {"step": 0.0, "generation": 0.0, "tokens": 0}

    def reward(completions, completion_ids, gold, **_) -> list[float]:
        record["tokens"] = sum(map(len, completion_ids))
        return [float(f"\\boxed{{{answer}}}" in text) for text, answer in zip(completions, gold, strict=True)]

    class Timed(GRPOTrainer):
        def _generate(self, prompts):
            start = time.perf_counter()
            result = super()._generate(prompts)
            record["generation"] = time.perf_counter() - start
            return result

    class Turns(TrainerCallback):
        def on_step_begin(self, *_, **__):
            sys.stdin.readline()
            self.start = time.perf_counter()

        def on_step_end(self, *_, **__):
            record["step"] = time.perf_counter() - self.start
            print(json.dumps({**record, "peak MiB": resident_mib("VmHWM")}), file=stdout, flush=True)

    n_responses = config.prompts_per_step * config.group_size
    n_rows = min(config.trl_rows, n_responses)
    quiet = dict(output_dir="out/trl", save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True)
    machine = dict(use_cpu=True, bf16=False, gradient_checkpointing=False, max_steps=config.turns + 1)
    sizes = dict(per_device_train_batch_size=n_rows, gradient_accumulation_steps=n_responses // n_rows)
    sampling = dict(num_generations=config.group_size, max_completion_length=config.max_response_tokens)
    loss = dict(scale_rewards="none", epsilon_high=config.clip_high, learning_rate=1e-7, shuffle_dataset=False)
    grpo_config = GRPOConfig(**quiet, **machine, **sizes, **sampling, **loss, temperature=config.temperature)
    Timed(config.model, reward, grpo_config, dataset, processing_class=tokenizer, callbacks=[Turns()]).train()


def main() -> None:
    config = parse_options(RaceConfig, sys.argv[1:])
    race(config) if config.trl_python else trl_side(config)


if __name__ == "__main__":
    run_command(main)
