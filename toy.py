"""The embedded toy: a task, a tokenizer and a base model small enough for a laptop, on the same path as a real model.

    python toy.py            # builds out/toy-demo/ (about a minute); train.py does so by itself on first use
    python toy.py chains     # a second task: longer chains, where a third of the right answers come from wrong ones

A problem is a chain of one-digit sums and differences modulo 10, worked from left to right; a response writes every
intermediate result and then boxes the last:

    problem   3+4-9          response   7, 8, \\boxed{8}          since 3+4 = 7 and 7-9 = -2 = 8 (mod 10)

The base model imitates a teacher who is unsure of some facts (a+b or a-b) and wrong about others: of each fact he knows
the right digit with a fixed probability q and otherwise says one fixed wrong digit. Where q is small he has a
misconception: greedy decoding is wrong there, and only sampling finds the right answer now and then. So it is with
language models before RL: pass@1 is low, pass@16 is not, and most groups of four responses agree.

The rest of the project sees nothing special: model/ is a Hugging Face folder for transformers and vLLM, the prompts
are JSONL files, and the chat template gets the same two sentences as a real model's (each is a single token here, which
keeps a prompt at about 11 tokens). Delete out/toy-* to build it again.
"""

from ada import UserError, run_command  # first: it sets the number of threads, which torch reads on import

# isort: split
import fcntl
import json
import random
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from tqdm import trange
from transformers import AddedToken, GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from ada.data import INSTRUCTION, SYSTEM, ChatTemplate, DataConfig

OUT = Path("out")
SEED = 0
TRAIN_ROWS, TEST_ROWS = 1024, 256
OPERATIONS = "+-"


@dataclass(frozen=True)
class Task:
    """What the teacher knows: a share `share[i]` of the facts with probability `knows[i]`."""

    knows: tuple[float, float, float]  # well known, shaky, misconception
    share: tuple[float, float, float]
    lengths: tuple[int, ...]  # operations in a chain


TASKS = {  # the base model's held-out reward and pass@16: demo 0.26 and 0.53, chains 0.17 and 0.76
    "demo": Task(knows=(0.95, 0.5, 0.05), share=(0.35, 0.25, 0.4), lengths=(1, 2)),
    "chains": Task(knows=(0.9, 0.5, 0.15), share=(0.3, 0.3, 0.4), lengths=(2, 3)),
}


def is_toy(path: str) -> bool:
    """Is this a path in one of the toy's folders, such as out/toy-demo/model?"""
    parts = Path(path).parts
    return parts[:1] == (OUT.name,) and len(parts) == 3 and parts[1].removeprefix("toy-") in TASKS


def build_if_missing(path: str) -> None:
    """Build the toy that a path is part of, if it isn't there yet; other paths are none of its business.

    Any number of processes may ask at once: one builds, the others wait.
    """
    if is_toy(path) and not Path(path).parent.exists():
        build(Path(path).parts[1].removeprefix("toy-"))


def build(task: str) -> Path:
    """Writes out/toy-TASK and returns it; the folder appears complete or not at all, also if this process is killed."""
    folder, unfinished = OUT / f"toy-{task}", OUT / f".toy-{task}.unfinished"
    OUT.mkdir(parents=True, exist_ok=True)
    with open(OUT / f".toy-{task}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel drops it with the process, however that ends
        if not folder.exists():
            shutil.rmtree(unfinished, ignore_errors=True)  # of a build that was killed
            write(TASKS[task], unfinished)
            unfinished.rename(folder)
    return folder


# ------------------------------------------------------------------------------------------------------------- the task


def solve(problem: str) -> str:
    """The right response.

    >>> print(solve("3+4-9"))
    7, 8, \\boxed{8}
    """
    return work(problem, lambda a, operation, b: (a + b if operation == "+" else a - b) % 10)


def work(problem: str, fact) -> str:
    """The response of someone who takes fact(a, operation, b) for the result of each step."""
    results = [int(problem[0])]
    for operation, operand in zip(problem[1::2], problem[2::2], strict=True):
        results.append(fact(results[-1], operation, int(operand)))
    return "".join(f"{result}, " for result in results[1:]) + f"\\boxed{{{results[-1]}}}"


def boxed(response: str) -> str:
    """What the box of a toy response holds, "" if there is none (training and evaluation use ada.reward instead)."""
    return response.rpartition("\\boxed{")[2].partition("}")[0] if "\\boxed{" in response else ""


def chain_is_right(prompt: str, response: str) -> bool:
    r"""Whether every intermediate result is right: a verifier of answers also pays wrong chains that end well.

    `prompt` is a problem, or a prompt after the chat template: nothing but the chain has digits in it. What may follow
    the box doesn't count.

    >>> chain_is_right("3+4-9", r"7, 8, \boxed{8}"), chain_is_right("3+4-9", r"6, 8, \boxed{8}")
    (True, False)
    """
    return response.strip().startswith(solve(re.search(r"\d([+-]\d)+", prompt).group()))


def right_chain(response: str, row: dict) -> bool:
    """A reward that pays for right answers by right chains only: torchrun train.py --reward toy:right_chain"""
    return boxed(response) == row["answer"] and chain_is_right(row["problem"], response)


def make_teacher(task: Task, rng: random.Random):
    """A function fact(a, operation, b) -> digit with the teacher's noise."""
    facts = [(a, operation, b) for a in range(10) for operation in OPERATIONS for b in range(10)]
    rng.shuffle(facts)
    beliefs = {}
    for i, (a, operation, b) in enumerate(facts):  # exact shares rather than drawn ones: 200 facts are few
        position = (i + 0.5) / len(facts)
        kind = sum(position > sum(task.share[: k + 1]) for k in range(2))
        right = (a + b if operation == "+" else a - b) % 10
        beliefs[a, operation, b] = (right, (right + rng.randint(1, 9)) % 10, task.knows[kind])

    def fact(a, operation, b):
        right, wrong, q = beliefs[a, operation, b]
        return right if rng.random() < q else wrong

    return fact


def draw_problem(rng: random.Random, task: Task) -> str:
    """A chain of a random length."""
    steps = "".join(rng.choice(OPERATIONS) + str(rng.randrange(10)) for _ in range(rng.choice(task.lengths)))
    return str(rng.randrange(10)) + steps


def draw_distinct(rng: random.Random, task: Task, count: int) -> list[str]:
    """`count` different problems in random order. Of chains of one step there are 200; nearly all are among them."""
    found = {}  # keeps the order of insertion; a set's would differ from process to process
    while len(found) < count:
        found[draw_problem(rng, task)] = True
    problems = list(found)
    rng.shuffle(problems)  # or the short chains, which run out first, would all come early
    return problems


# --------------------------------------------------------------------------------------------- tokenizer and base model


def make_tokenizer():
    """Qwen2's class, so that AutoTokenizer and vLLM load it beside a Qwen2 model: bytes, without merges.

    The two fixed sentences, ", " and the opening of the box are whole tokens; any other text is a token per byte.
    """
    # Bytes cover everything, so <unk> never occurs; the class asks for one.
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<pad>"}
    roles = ["<|system|>", "<|user|>", "<|assistant|>"]
    tokens = ["<pad>", "<bos>", "<eos>", *roles, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Qwen2Tokenizer(vocabulary, [], **special, clean_up_tokenization_spaces=False)
    tokenizer.add_special_tokens({"extra_special_tokens": roles})
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (", ", "\\boxed{", SYSTEM, INSTRUCTION)])
    tokenizer.chat_template = (
        "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
        "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    return tokenizer


def make_model(tokenizer):
    """An untrained Qwen2 of 2 layers. Heads are 32 wide, the narrowest that vLLM's CPU attention takes."""
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        initializer_range=0.08,  # with the usual 0.02 so small a model has not learnt chains after 350 steps
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        dtype="float32",
        **ids,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **ids)
    return model


def pretrain(model, tokenizer, task: Task, rng: random.Random, *, steps=350, batch_size=256, learning_rate=4e-3):
    """Imitation of the teacher: next-token loss on his responses, a fresh batch of random chains at each step."""
    before, after = ChatTemplate(tokenizer, DataConfig())("@")[0].split("@")
    assistant = tokenizer.convert_tokens_to_ids("<|assistant|>")
    teacher = make_teacher(task, rng)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(  # 20 steps up, the second half down to zero
        optimizer, lambda step: min((step + 1) / 20, 1.0, 2 * (steps - step) / steps)
    )
    model.train()
    for _ in (bar := trange(steps, desc="toy: pretraining", unit="step", mininterval=1)):
        problems = [draw_problem(rng, task) for _ in range(batch_size)]
        texts = [before + problem + after + work(problem, teacher) + "<eos>" for problem in problems]
        batch_BT = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
        ids_BT = batch_BT["input_ids"]
        answered_BT = (ids_BT == assistant).cumsum(1).bool() & (ids_BT != assistant) & batch_BT["attention_mask"].bool()
        loss = model(**batch_BT, labels=ids_BT.where(answered_BT, -100)).loss  # shifted by one inside
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
    model.eval()


def sample(model, tokenizer, problems: list[str], *, count=16) -> dict[str, list[str]]:
    """`count` responses to each problem at temperature 1, by transformers alone: the engine is not up at this point."""
    template = ChatTemplate(tokenizer, DataConfig())
    responses = {}
    for length in sorted({len(problem) for problem in problems}):  # equal lengths need no padding
        alike = [problem for problem in problems if len(problem) == length]
        ids_BT = torch.tensor([template(problem)[1] for problem in alike])
        with torch.inference_mode():
            drawn = model.generate(
                ids_BT, attention_mask=torch.ones_like(ids_BT), num_return_sequences=count, max_new_tokens=16
            )
        texts = tokenizer.batch_decode(drawn[:, ids_BT.shape[1] :], skip_special_tokens=True)
        responses |= {problem: texts[i * count : (i + 1) * count] for i, problem in enumerate(alike)}
    return {problem: responses[problem] for problem in problems}


# ----------------------------------------------------------------------------------------------------------- the folder


def write(task: Task, folder: Path):
    """Trains the base model, samples from it, writes model/ and the three splits into `folder`."""
    rng = random.Random(SEED)
    tokenizer = make_tokenizer()
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they were
        torch.manual_seed(SEED)
        model = make_model(tokenizer)
        pretrain(model, tokenizer, task, rng)
        problems = draw_distinct(rng, task, TRAIN_ROWS + TEST_ROWS)
        responses = sample(model, tokenizer, problems)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")

    rows = []
    for problem in problems:
        answer = boxed(solve(problem))
        right = [response for response in responses[problem] if boxed(response) == answer]
        spurious = sum(not chain_is_right(problem, response) for response in right)
        rows.append({"problem": problem, "answer": answer, "right_of_16": len(right), "spurious": spurious})
    test, train = rows[:TEST_ROWS], rows[TEST_ROWS:]
    hard = [row for row in train if row["right_of_16"] in (1, 2)]
    for name, split in (("train", train), ("hard", hard), ("test", test)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in split))
        right, spurious = (sum(row[key] for row in split) for key in ("right_of_16", "spurious"))
        reward, share = right / (16 * len(split) or 1), spurious / (right or 1)
        print(f"{name}.jsonl: {len(split)} prompts; base model {reward:.1%} right, {share:.0%} of it by wrong chains")


def main() -> None:
    task = (sys.argv[1:] or ["demo"])[0]
    if task in ("-h", "--help"):
        return print(__doc__)
    if task not in TASKS or len(sys.argv) > 2:
        raise UserError(f"usage: python toy.py [{'|'.join(TASKS)}]")
    print(build(task))


if __name__ == "__main__":
    run_command(main)
