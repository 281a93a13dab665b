"""Our `grpo` against TRL's GRPOTrainer: seconds per step, generation and training apart, and peak memory.

    python3.11 -m venv ../trl-venv      # outside of the repository; a CPU torch first, as in the README
    ../trl-venv/bin/pip install -r bench/requirements-trl.txt
    python bench/trl.py toy --trl_python ../trl-venv/bin/python        # 128 prompts x 4 responses of some 8 tokens
    python bench/trl.py random --trl_python ../trl-venv/bin/python     # 42 M parameters, 8 x 4 of 1 to 500 tokens

Both have the same model folder, prompts in the same order, 4 responses to each at temperature 1, fp32, one thread, one
optimiser step of AdamW per batch on all its responses, token mean, advantages against the group's mean, no KL. Each
lives in a process of its own; they take steps in turn, one at rest while the other works. The random model has 32,768
tokens, of which 121 end a response, so lengths are geometric with a mean of about 200. What differs, and is meant to:

  - ours generates in vLLM (continuous batching, weights copied after each update), TRL with transformers' generate (one
    padded batch until the longest response ends, no copy). TRL can use vLLM, too, but only on GPUs.
  - ours cuts the update into micro-batches of at most 4,096 tokens of like lengths, TRL into 8 rows padded to the
    longest of the batch (toy: 512 rows at once in both); our log-probs never hold [B, T, V].
  - ours grades in a process of its own, with math-verify; TRL calls a cheap Python function.

Medians over the turns; TRL over ours is printed last.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # not this folder: `import trl` would find this file

from bench.common import machine, random_model, status_mib  # noqa: E402

N = 4
SETTINGS = {
    "toy": dict(n_prompts=128, max_tokens=32, micro_batch_tokens=16384, micro_batch_rows=512),
    "random": dict(n_prompts=8, max_tokens=500, micro_batch_tokens=4096, micro_batch_rows=8),
}
KEYS = ("step", "generation", "training", "tokens", "peak", "base")


def tell(stdout, record: dict[str, float], base_mib: float) -> None:
    """A step's figures to the parent process; the peak is that of the process so far."""
    print(json.dumps({**record, "peak": status_mib("VmHWM"), "base": base_mib}), file=stdout, flush=True)


# ----------------------------------------------------------------------------------------------------------------
# Either side: a step per line of standard input


def our_side(stdout, folder: str, data: str, *, n_prompts, max_tokens, micro_batch_tokens, **_) -> None:
    from ada.data import load_prompts, load_tokenizer
    from ada.engine import Engine
    from ada.reward import Scorer
    from ada.trainer import Trainer, init_ranks
    from bench.step import one_step

    ranks = init_ranks()
    prompts, _ = load_prompts(data, load_tokenizer(folder), max_prompt_tokens=32)
    engine, scorer = Engine(folder, max_tokens=max_tokens, max_prompt_tokens=32), Scorer()
    engine.sleep()
    trainer = Trainer(folder, ranks, lr=1e-7, micro_batch_tokens=micro_batch_tokens)
    scorer.wait_until_ready()
    engine.sync(trainer.named_weights())
    base = status_mib("VmRSS")
    for step, _ in enumerate(sys.stdin):
        mine = prompts[step * n_prompts : (step + 1) * n_prompts]
        seconds = one_step("grpo", engine, scorer, trainer, mine, step, keep_uniform=True)
        training = seconds["update"] + seconds["sync"]
        record = {"step": seconds["step"], "generation": seconds["sampling"], "training": training}
        tell(stdout, {**record, "tokens": seconds["tokens"]}, base)
    scorer.close()
    os._exit(0)


def trl_side(stdout, folder: str, data: str, *, n_prompts, max_tokens, micro_batch_rows, **_) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from ada.data import apply_template
    from ada.toy import boxed

    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in Path(data).read_text().splitlines()]
    dataset = Dataset.from_list(
        [{"prompt": apply_template(tokenizer, r["problem"])[0], "gold": r["answer"]} for r in rows]
    )
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
            training = seconds - record["generation"]
            tell(stdout, {"step": seconds, "training": training, **record}, base)

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=micro_batch_rows,
        gradient_accumulation_steps=n_prompts * N // micro_batch_rows,
        num_generations=N,
        max_completion_length=max_tokens,
        temperature=1.0,
        scale_rewards="none",
        epsilon_high=0.28,
        learning_rate=1e-7,
        max_grad_norm=1.0,
        max_steps=1000,
        shuffle_dataset=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Timed(folder, reward, config, train_dataset=dataset, processing_class=tokenizer, callbacks=[Turns()])
    base = status_mib("VmRSS")
    trainer.train()


# ----------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=SETTINGS)
    parser.add_argument("--trl_python", help="python of the virtual environment with TRL")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--side", nargs=3, metavar=("SIDE", "FOLDER", "DATA"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        stdout = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what the libraries print
        side, folder, data = arguments.side
        {"ours": our_side, "trl": trl_side}[side](stdout, folder, data, **SETTINGS[arguments.setting])
        return

    from ada import toy

    folder, data = toy.locate("toy-demo/model"), toy.locate("toy-demo/train")
    if arguments.setting == "random":
        folder = random_model(tempfile.mkdtemp(), hidden=512, layers=8, vocabulary=32768, n_stop=121)
    pythons = {"ours": sys.executable, "trl": arguments.trl_python}
    children = {
        side: subprocess.Popen(
            [python, __file__, arguments.setting, "--side", side, folder, data],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for side, python in pythons.items()
    }
    print(machine())
    records = {side: [] for side in children}
    for turn in range(arguments.turns + 1):
        for side, child in children.items():
            child.stdin.write("step\n")
            child.stdin.flush()
            record = json.loads(child.stdout.readline())
            print(f"turn {turn}, {side}: " + ", ".join(f"{key} {record[key]:,.2f}" for key in KEYS), flush=True)
            if turn:  # the first warms up
                records[side].append(record)
    for child in children.values():
        child.stdin.close()
        child.wait()
    for key in KEYS:
        unit = {"tokens": "per step", "peak": "MiB", "base": "MiB"}.get(key, "s")
        ours, trl = (statistics.median(record[key] for record in records[side]) for side in ("ours", "trl"))
        print(f"{key:>10}: ours {ours:,.2f}, trl {trl:,.2f} {unit}; trl / ours {trl / ours:.2f}x")


if __name__ == "__main__":
    main()
