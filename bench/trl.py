"""Our `grpo` against TRL's GRPOTrainer: seconds per step, generation and training apart, and peak memory.

    python3.11 -m venv ../trl-venv      # outside of the repository; a CPU torch first, as in the README
    ../trl-venv/bin/pip install -r bench/requirements-trl.txt
    python -m bench.trl --trl_python ../trl-venv/bin/python            # the toy; the smallest: --prompts_per_step 8
    python -m bench.trl --trl_python ../trl-venv/bin/python --model out/random-512x8x32768 --prompts_per_step 8 \\
        --max_response_tokens 500 --micro_batch_tokens 4096 --trl_rows 8 --turns 3

It takes train.py's options, --model among them. Both sides have the same model folder, prompts in the same order, 4
responses to each at temperature 1, fp32, one thread, one optimiser step of AdamW per batch on all its responses, token
mean, advantages against the group's mean, no KL. Each lives in a process of its own; they take steps in turn, one at
rest while the other works. The random model has 42 M parameters; its responses have 1 to 500 tokens. What differs, and
is meant to:

  - ours generates in vLLM (continuous batching, weights copied after each update), TRL with transformers' generate (one
    padded batch until the longest response ends, no copy). TRL can use vLLM, too, but only on GPUs.
  - ours cuts the update into micro-batches of at most --micro_batch_tokens tokens of like lengths, TRL into --trl_rows
    rows padded to the longest of the batch; our log-probs never hold [B, T, V].
  - ours grades in a process of its own, with math-verify; TRL calls a cheap Python function.

Medians over the turns; the ratios are printed last.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace

from ada import option, run_command
from ada.data import load_prompts, load_tokenizer
from ada.support.options import parse_options
from bench.common import BenchConfig, build_if_missing, machine, median, print_ratio, resident_mib, set_up, take_turns
from toy import boxed, build_if_missing as build_toy


@dataclass
class RaceConfig(BenchConfig):
    trl_python: str = option("", "python of the virtual environment with TRL")
    trl_rows: int = option(512, "sequences per micro-batch of TRL", at_least=1)
    side: str = option("", "ours or trl, in the processes that this one starts")


def our_side(config: RaceConfig, tell) -> None:
    from bench.step import one_step

    config = replace(config, lr=1e-7, keep_zero_variance=True)  # TRL trains on zero-variance groups, too
    prompts, *parts = set_up(config)
    base = resident_mib("VmRSS")
    for step, _ in enumerate(sys.stdin):
        first = step * config.prompts_per_step
        record = one_step("grpo", step, config, prompts[first : first + config.prompts_per_step], *parts)
        training = record["time/update"] + record["time/sync"]
        seconds = {"step": record["time/step"], "generation": record["time/sampling"], "training": training}
        tell({**seconds, "tokens": record["sampling/tokens"], "base": base})


def trl_side(config: RaceConfig, tell) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    prompts, _ = load_prompts(config.train_data, load_tokenizer(config.model), config)
    dataset = Dataset.from_list([{"prompt": prompt.text, "gold": prompt.gold} for prompt in prompts])
    record = {"generation": 0.0, "tokens": 0}

    def reward(completions, completion_ids, gold, **_) -> list[float]:
        record["tokens"] = sum(map(len, completion_ids))
        return [float(boxed(text) == answer) for text, answer in zip(completions, gold, strict=True)]

    class Timed(GRPOTrainer):
        def _generate(self, prompts):
            start = time.perf_counter()
            result = super()._generate(prompts)
            record["generation"] = time.perf_counter() - start
            return result

    class Turns(TrainerCallback):
        def on_step_begin(self, *_, **__):
            if not sys.stdin.readline():
                os._exit(0)
            self.start = time.perf_counter()

        def on_step_end(self, *_, **__):
            seconds = time.perf_counter() - self.start
            tell({"step": seconds, "training": seconds - record["generation"], **record, "base": base})

    grpo_config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=config.trl_rows,
        gradient_accumulation_steps=config.prompts_per_step * config.group_size // config.trl_rows,
        num_generations=config.group_size,
        max_completion_length=config.max_response_tokens,
        temperature=config.temperature,
        scale_rewards="none",
        epsilon_high=config.clip_high,
        learning_rate=1e-7,
        max_steps=1000,
        shuffle_dataset=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    options = dict(train_dataset=dataset, processing_class=tokenizer, callbacks=[Turns()])
    trainer = Timed(config.model, reward, grpo_config, **options)
    base = resident_mib("VmRSS")
    trainer.train()


def race(config: RaceConfig) -> None:
    build_toy(config.model)
    build_toy(config.train_data)
    build_if_missing(config.model)

    def step_of(side: str, python: str):
        command = [python, "-m", "bench.trl", *sys.argv[1:], "--side", side]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

        def step(turn: int) -> dict[str, float]:
            child.stdin.write("step\n")
            child.stdin.flush()
            record = json.loads(child.stdout.readline())
            figures = ", ".join(f"{key} {value:,.2f}" for key, value in record.items())
            print(f"turn {turn}, {side}: {figures}", flush=True)
            return record

        return step

    print(machine())
    records = take_turns(
        {side: step_of(side, python) for side, python in {"ours": sys.executable, "trl": config.trl_python}.items()},
        config.turns,
    )
    keys = list(records["ours"][0])
    for key in keys:
        print(f"{key:>10}: ours {median(records, 'ours', key):,.2f}, trl {median(records, 'trl', key):,.2f}")
    print_ratio(records, "trl", "ours", *keys)


def main() -> None:
    config = parse_options(RaceConfig, sys.argv[1:])
    if not config.side:
        return race(config)
    config.trl_rows = min(config.trl_rows, config.prompts_per_step * config.group_size)
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print

    def tell(record: dict[str, float]) -> None:
        """A step's figures to the parent process; the peak is that of the process so far."""
        print(json.dumps({**record, "peak": resident_mib("VmHWM")}), file=stdout, flush=True)

    {"ours": our_side, "trl": trl_side}[config.side](config, tell)


if __name__ == "__main__":
    run_command(main)
