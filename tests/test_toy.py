"""The toy: its task, its folder as transformers and math-verify see it, and builds that are killed or compete."""

import multiprocessing
import os
import random
import re
import sys
import time
import unicodedata
from pathlib import Path

import pytest
import torch
from commands import read
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import toy
from ada import UserError
from ada.data import INSTRUCTION, SYSTEM, ChatTemplate, DataConfig
from ada.reward import last_boxed

chains = st.from_regex(r"[0-9]([+-][0-9]){1,3}", fullmatch=True, alphabet=st.characters(codec="ascii"))


def templated(tokenizer, problem: str) -> tuple[str, list[int]]:
    return ChatTemplate(tokenizer, DataConfig())(problem)


@given(chains)
def test_solve_against_python(problem):
    response = toy.solve(problem)
    assert int(last_boxed(response)) == eval(problem) % 10
    assert toy.boxed(response) == last_boxed(response)
    assert toy.chain_is_right(problem, response)


@pytest.mark.parametrize(
    "response, right",
    [
        (r"7, 8, \boxed{8}", True),
        (r"7, 8, \boxed{8}8}8}", True),  # babble after the box is another matter
        (r"6, 8, \boxed{8}", False),  # two mistakes that cancel
        (r"7, 9, \boxed{9}", False),
        (r"8, \boxed{8}", False),
        ("", False),
    ],
)
def test_chain_is_right_sees_spurious_positives(response, right):
    assert toy.chain_is_right("3+4-9", response) == right
    assert toy.right_chain(response, {"problem": "3+4-9", "answer": "8"}) == right


def test_the_reward_for_chains_takes_the_last_box():
    assert not toy.right_chain(r"7, 8, \boxed{8} \boxed{3}", {"problem": "3+4-9", "answer": "8"})


def test_chain_is_right_reads_templated_prompts(toy_tokenizer):
    text, _ = templated(toy_tokenizer, "3+4-9")
    assert toy.chain_is_right(text, r"7, 8, \boxed{8}") and not toy.chain_is_right(text, r"6, 8, \boxed{8}")


@pytest.mark.parametrize("task", toy.TASKS.values(), ids=toy.TASKS)
def test_teacher_knows_the_stated_shares(task):
    teacher = toy.make_teacher(task, random.Random(1))
    counts = dict.fromkeys(task.knows, 0)
    for a in range(10):
        for operation in "+-":
            for b in range(10):
                said = [teacher(a, operation, b) for _ in range(400)]
                assert len(set(said)) <= 2
                q = said.count(eval(f"{a}{operation}{b}") % 10) / 400
                counts[min(task.knows, key=lambda known, q=q: abs(known - q))] += 1
    assert list(counts.values()) == [round(200 * share) for share in task.share]


def test_prompt_and_response_tokens(toy_tokenizer):
    text, ids = templated(toy_tokenizer, "3+4-9")
    assert text == f"<bos><|system|>{SYSTEM}<|user|>3+4-9{INSTRUCTION}<|assistant|>"
    assert len(ids) == 11 and ids.count(toy_tokenizer.bos_token_id) == 1
    ids = toy_tokenizer(toy.solve("3+4-9"), add_special_tokens=False)["input_ids"]
    assert len(ids) == 7
    assert toy_tokenizer.decode([*ids, toy_tokenizer.eos_token_id], skip_special_tokens=True) == r"7, 8, \boxed{8}"


@given(text=st.text(st.characters(codec="utf-8")))
def test_any_text_survives_the_tokenizer(toy_tokenizer, text):
    ids = toy_tokenizer(text, add_special_tokens=False)["input_ids"]
    assert toy_tokenizer.decode(ids) == unicodedata.normalize("NFC", text)


def test_folder_loads_as_any_model(toy_folder):
    made, loaded = toy.make_tokenizer(), AutoTokenizer.from_pretrained(toy_folder / "model")
    assert templated(loaded, "3+4-9") == templated(made, "3+4-9")
    response = toy.solve("3+4-9")
    ids = loaded(response, add_special_tokens=False)["input_ids"]
    assert ids == made(response, add_special_tokens=False)["input_ids"] and loaded.decode(ids) == response
    config = AutoConfig.from_pretrained(toy_folder / "model")
    assert config.vocab_size == len(loaded) and config.hidden_size // config.num_attention_heads == 32
    assert config.tie_word_embeddings and str(config.dtype).endswith("float32")
    generation = GenerationConfig.from_pretrained(toy_folder / "model")
    ids = [loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id]
    assert len(set(ids)) == 3
    assert [generation.pad_token_id, generation.bos_token_id, generation.eos_token_id] == ids


def test_splits(toy_folder):
    train, hard, test = (read(toy_folder / f"{split}.jsonl") for split in ("train", "hard", "test"))
    problems = {row["problem"] for row in train}
    assert len(problems) == len(train) == 1024 and len(test) == len({row["problem"] for row in test}) == 256
    assert not problems & {row["problem"] for row in test}
    assert hard == [row for row in train if row["right_of_16"] in (1, 2)] and len(hard) >= 128
    for row in train + test:
        assert row["answer"] == last_boxed(toy.solve(row["problem"]))


def test_base_model_has_head_room(toy_folder):
    """Rewarded now and then, wrong by greedy decoding, right in 16 tries: what adaptive sampling is for."""
    rows = read(toy_folder / "test.jsonl")
    reward = sum(row["right_of_16"] for row in rows) / len(rows) / 16
    assert 0.2 < reward < 0.4
    assert sum(row["right_of_16"] > 0 for row in rows) / len(rows) > reward + 0.2
    model = AutoModelForCausalLM.from_pretrained(toy_folder / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(toy_folder / "model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        responses = toy.sample(model, tokenizer, [row["problem"] for row in rows], count=8)
    right = [toy.boxed(text) == row["answer"] for row in rows for text in responses[row["problem"]]]
    assert abs(sum(right) / len(right) - reward) < 0.05  # 2048 draws: standard error below 0.01
    texts = [text for texts in responses.values() for text in texts]
    well_formed = [re.fullmatch(r"(\d, ){1,2}\\boxed\{\d\}", text) is not None for text in texts]
    assert sum(well_formed) > 0.99 * len(texts)


def test_pretraining_is_deterministic_and_leaves_the_callers_random_state(tmp_path, monkeypatch):
    pretrain = toy.pretrain
    monkeypatch.setattr(toy, "pretrain", lambda *arguments: pretrain(*arguments, steps=3, batch_size=8))
    monkeypatch.setattr(toy, "TRAIN_ROWS", 8)
    monkeypatch.setattr(toy, "TEST_ROWS", 8)
    state = torch.random.get_rng_state()
    for folder in ("a", "b"):
        toy.write(toy.TASKS["demo"], tmp_path / folder)
        assert torch.equal(torch.random.get_rng_state(), state)
    for file in ("model/model.safetensors", "train.jsonl", "test.jsonl"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_other_paths_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("Qwen/Qwen2.5-Math-1.5B", "data/train.jsonl", "out/toy-demo", "out/toy-x/model", "toy-demo/model", ""):
        toy.build_if_missing(path)
        assert not toy.is_toy(path)
    assert not list(tmp_path.iterdir())
    assert toy.is_toy("out/toy-demo/model") and toy.is_toy("out/toy-chains/train.jsonl")


def build(folder: Path, seconds: float) -> None:
    """What a command does on first use, with a short sleep for the minute of training; leaves a mark of each start."""

    def write(task, unfinished):
        unfinished.mkdir()
        with open("starts", "a") as file:
            file.write("x")
        (unfinished / "train.jsonl").write_text("half")
        time.sleep(seconds)
        (unfinished / "train.jsonl").write_text("whole")

    os.chdir(folder)
    toy.write = write
    toy.build_if_missing("out/toy-demo/train.jsonl")
    assert Path("out/toy-demo/train.jsonl").read_text() == "whole"


def start(folder: Path, seconds: float):
    process = multiprocessing.get_context("forkserver").Process(target=build, args=(folder, seconds))
    process.start()
    return process


def test_competing_builders_build_once(tmp_path):
    builders = [start(tmp_path, 0.5) for _ in range(4)]
    for builder in builders:
        builder.join(60)
    assert [builder.exitcode for builder in builders] == [0] * 4
    assert (tmp_path / "starts").read_text() == "x"


def test_killed_build_leaves_nothing_half_usable(tmp_path):
    builder = start(tmp_path, 60)
    while not (tmp_path / "starts").exists():
        assert builder.is_alive()
        time.sleep(0.02)
    builder.kill()
    builder.join()
    assert not (tmp_path / "out/toy-demo").exists()
    again = start(tmp_path, 0)
    again.join(60)
    assert again.exitcode == 0
    assert (tmp_path / "starts").read_text() == "xx"


def test_failed_build_can_be_repeated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def fail(task, folder):
        folder.mkdir()
        raise OSError("disk full")

    monkeypatch.setattr(toy, "write", fail)
    for _ in range(2):
        with pytest.raises(OSError, match="disk full"):
            toy.build_if_missing("out/toy-demo/train.jsonl")
        assert not Path("out/toy-demo").exists()


@pytest.mark.parametrize("arguments", [["sums"], ["demo", "chains"]])
def test_command_refuses_unknown_tasks(arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["toy.py", *arguments])
    with pytest.raises(UserError, match=r"usage: python toy.py \[demo\|chains\]"):
        toy.main()
