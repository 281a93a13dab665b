"""Prompts: every kind of source, column, gold and broken row that real data sets have, and batches without state."""

import json
import logging
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ada.data import (
    INSTRUCTION,
    LOGGED_PER_CAUSE,
    SYSTEM,
    DataError,
    apply_template,
    batch,
    choose_columns,
    describe,
    load_prompts,
    normalise,
)
from ada.sampler import Prompt


def write_jsonl(path, rows) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def load(tmp_path, toy_tokenizer):
    """load(rows, ...) -> (prompts, counts), by way of a JSONL file; a row that is text goes into it as it is."""

    def load(rows, **options):
        source = write_jsonl(tmp_path / "data.jsonl", rows)
        return load_prompts(source, toy_tokenizer, **{"max_prompt_tokens": 1024} | options)

    return load


def problems(prompts: list[Prompt]) -> list[str]:
    return [prompt.text.split("<|user|>")[1].removesuffix(INSTRUCTION + "<|assistant|>") for prompt in prompts]


# ---------------------------------------------------------------------------------------------------- columns and golds

# One row in the schema of each public file, with problems of our own.
SCHEMAS = {
    "math500": ({"problem": "What is $1+1$?", "solution": r"$1+1=\boxed{2}$.", "answer": "2", "level": 1}, "2"),
    "aime24": (
        {"id": 60, "problem": "P?", "solution": r"\boxed{204}", "answer": "204", "url": "x", "question": "P?"},
        "204",
    ),
    "amc23": ({"id": 0, "problem": "How far?", "answer": 27.0, "url": "x", "question": "How far?"}, "27"),
    "minerva": ({"problem": "How large?", "solution": r"So $s=\boxed{1.6}$ cm", "type": "Astronomy", "idx": 0}, "1.6"),
    "olympiadbench": (
        {
            "id": 1606,
            "subfield": "Combinatorics",
            "context": None,
            "question": "How many moves?",
            "solution": ["Two are enough.", "One isn't."],
            "final_answer": ["2"],
            "is_multiple_answer": False,
            "unit": None,
            "answer_type": "Numerical",
            "error": None,
        },
        "2",
    ),
    "reinforce_ada": ({"problem": "Halve one.", "gt": r"\frac{1}{2}"}, r"\frac{1}{2}"),
    "prompt": ({"prompt": "Three?", "answer": 3}, "3"),
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_public_schemas(load, schema):
    row, gold = SCHEMAS[schema]
    [prompt], counts = load([row])
    assert prompt.gold == gold and counts["kept"] == 1
    assert problems([prompt]) == [row.get("problem") or row.get("question") or row.get("prompt")]


@pytest.mark.parametrize("missing", [None, float("nan"), "", []])
def test_solution_stands_in_for_a_missing_answer(load, missing):
    [prompt], _ = load([{"problem": "P?", "answer": missing, "solution": r"Hence \boxed{7}."}])
    assert prompt.gold == "7"


def test_annotated_answer_comes_before_the_solution(load):
    [prompt], _ = load([{"problem": "P?", "solution": r"\boxed{8}", "answer": "7"}])
    assert prompt.gold == "7"


def test_prose_of_a_solution_is_no_answer(load, caplog):
    rows = [{"problem": "P?", "solution": "Yes"}, {"problem": "Q?", "solution": r"\boxed{1}"}]
    prompts, counts = load(rows)
    assert problems(prompts) == ["Q?"] and counts["gold_unreadable"] == 1
    assert "data.jsonl:1: dropped: solution: no \\boxed{}" in caplog.text


def test_columns_can_be_named(load):
    rows = [{"problem": "no", "task": "yes", "answer": "1", "label": "2"}]
    [prompt], _ = load(rows, prompt_column="task", answer_column="label")
    assert problems([prompt]) == ["yes"] and prompt.gold == "2"


@pytest.mark.parametrize("options", [{}, {"prompt_column": "text"}, {"answer_column": "label"}])
def test_missing_column_lists_those_there_are(load, options):
    rows = [{"aufgabe": "P?", "antwort": "1"}] if not options else [{"problem": "P?", "answer": "1"}]
    with pytest.raises(DataError) as error:
        load(rows, **options)
    assert f"it has: {', '.join(rows[0])}" in str(error.value) and "\n" not in str(error.value)


# --------------------------------------------------------------------------------------------------------- dropped rows


def test_every_bad_row_is_counted_and_reported_by_line(load, caplog):
    good = {"problem": "P?", "answer": "1"}
    bad = [
        {"problem": None, "answer": "1"},
        {"answer": "1"},
        {"problem": " \n", "answer": "1"},
        {"problem": 5},
        ["P?"],
        7,
    ]
    unreadable = [{"problem": "Q?"}, {"problem": "R?", "answer": ""}, {"problem": "S?", "answer": None}]
    prompts, counts = load([good, *bad, *unreadable])
    assert counts == {"read": 10, "kept": 1, "bad_row": 6, "gold_unreadable": 3, "duplicate": 0, "too_long": 0}
    assert [record.message.split("data.jsonl:")[1].split(":")[0] for record in caplog.records] == [*"23456789", "10"]
    assert describe(counts) == "1 of 10 rows: 6 bad row, 3 gold unreadable"


def test_a_flood_of_bad_rows_goes_to_the_info_level(load, caplog):
    caplog.set_level(logging.INFO)
    load([{"problem": "P?", "answer": "1"}] + [{"problem": None}] * (LOGGED_PER_CAUSE + 5))
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.WARNING] * LOGGED_PER_CAUSE + [logging.INFO] * 5


def test_duplicates_are_removed_whatever_their_spacing(load):
    texts = ["Find  $x$", "Find $x$\n", " Find $x$", "Find $X$", "caf\u00e9", "cafe\u0301"]
    prompts, counts = load([{"problem": text, "answer": i} for i, text in enumerate(texts)])
    assert [prompt.gold for prompt in prompts] == ["0", "3", "4"] and counts["duplicate"] == 3
    assert [prompt.row for prompt in prompts] == [0, 1, 2]


def test_an_unusable_row_does_not_hide_its_good_copy(load):
    prompts, counts = load([{"problem": "P?", "answer": ""}, {"problem": "P?", "answer": "1"}])
    assert prompts[0].gold == "1" and counts["gold_unreadable"] == 1 and counts["duplicate"] == 0


def test_over_long_prompts_are_dropped_and_counted(load):
    rows = [{"problem": "1+2", "answer": "3"}, {"problem": "x" * 50, "answer": "3"}]
    prompts, counts = load(rows, max_prompt_tokens=9)  # exactly the first one's
    assert [len(prompt.tokens) for prompt in prompts] == [9] and counts["too_long"] == 1
    with pytest.raises(DataError, match=r"no prompt left \(max_prompt_tokens is 8\): 0 of 2 rows: 2 too long"):
        load(rows, max_prompt_tokens=8)


# ------------------------------------------------------------------------------------------------------ kinds of source


def test_json_array_json_lines_and_parquet_give_the_same(tmp_path, toy_tokenizer):
    import pyarrow
    import pyarrow.parquet

    rows = [{"question": f"{i}+1\u2028 is\r", "final_answer": [str(i + 1)]} for i in range(5)]
    (tmp_path / "array.json").write_text("\n" + json.dumps(rows, indent=1))
    write_jsonl(tmp_path / "lines.json", rows)
    (tmp_path / "marked.jsonl").write_bytes(
        b"\xef\xbb\xbf" + b"\r\n\r\n".join(json.dumps(row, ensure_ascii=False).encode() for row in rows)
    )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "table.parquet")
    files = ["array.json", "lines.json", "marked.jsonl", "table.parquet"]
    loaded = [load_prompts(str(tmp_path / file), toy_tokenizer, max_prompt_tokens=99) for file in files]
    assert len(loaded[0][0]) == 5 and all(each == loaded[0] for each in loaded)


def test_bad_json_names_file_and_line(load, tmp_path, toy_tokenizer):
    with pytest.raises(DataError, match=r"data\.jsonl:3: bad JSON: "):
        load([{"problem": "P?", "answer": "1"}, "", '{"problem": "Q?", '])
    (tmp_path / "array.json").write_text('[{"problem": "P?"},\n oops]')
    with pytest.raises(DataError, match=r"array\.json: bad JSON: .* line 2"):
        load_prompts(str(tmp_path / "array.json"), toy_tokenizer, max_prompt_tokens=99)
    (tmp_path / "latin.jsonl").write_bytes('{"problem": "café"}\n'.encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.jsonl:1: bad JSON: 'utf-8'"):
        load_prompts(str(tmp_path / "latin.jsonl"), toy_tokenizer, max_prompt_tokens=99)


def test_unusable_files(tmp_path, toy_tokenizer):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "fake.parquet").write_text("no parquet")
    (tmp_path / "table.csv").write_text("problem,answer\n")
    messages = {
        "missing.jsonl": "no such file",
        "missing.parquet": "no such file",
        "empty.jsonl": "no rows",
        "fake.parquet": "not a parquet file",
        "table.csv": "unknown kind of file",
    }
    for name, message in messages.items():
        with pytest.raises(DataError, match=message) as error:
            load_prompts(str(tmp_path / name), toy_tokenizer, max_prompt_tokens=99)
        assert name in str(error.value) and "\n" not in str(error.value)


def test_hugging_face_names(monkeypatch, toy_tokenizer):
    """Through a stand-in for the Hub: which split is taken, and one line for whatever goes wrong there."""
    import datasets

    rows = datasets.Dataset.from_list([{"problem": "P?", "gt": "1"}])
    other = datasets.Dataset.from_list([{"problem": "Q?", "gt": "2"}])
    hub = {
        "a/one": datasets.DatasetDict(test=rows),
        "a/two": datasets.DatasetDict(test=other, train=rows),
        "a/unclear": datasets.DatasetDict(test=rows, dev=other),
    }

    def load_dataset(name, split=None):
        if name not in hub:
            raise ConnectionError("cannot reach\nthe Hub")
        return hub[name] if split is None else hub[name][split]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    def load(name, **options):
        return problems(load_prompts(name, toy_tokenizer, max_prompt_tokens=99, **options)[0])

    assert load("a/one") == ["P?"] and load("a/two") == ["P?"] and load("a/two", split="test") == ["Q?"]
    with pytest.raises(DataError, match="a/unclear: choose a split; it has test, dev"):
        load("a/unclear")
    with pytest.raises(DataError, match="a/none: neither a file nor a data set that loads: cannot reach the Hub"):
        load("a/none")


def test_local_data_set_folder(tmp_path, monkeypatch, toy_tokenizer):
    """The real `datasets` on a folder: no network."""
    (tmp_path / "folder").mkdir()
    write_jsonl(tmp_path / "folder" / "train.jsonl", [{"problem": "P?", "answer": "1"}])
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    prompts, _ = load_prompts(str(tmp_path / "folder"), toy_tokenizer, max_prompt_tokens=99)
    assert problems(prompts) == ["P?"]


# -------------------------------------------------------------------------------------------------------- chat template


def test_template_gives_the_papers_messages_and_one_bos(toy_tokenizer):
    """A tokenizer that adds a BOS itself, as Llama's does, and a template that writes one too."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = {token: i for i, token in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    inner = Tokenizer(models.BPE(alphabet, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = (
        "{{ bos_token }}{{ date_string }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    text, ids = apply_template(tokenizer, "1+1?")
    assert text == f"<s>26 Jul 2024[system]{SYSTEM}[user]1+1?{INSTRUCTION}[assistant]"
    assert ids.count(0) == 1 and tokenizer.decode(ids) == text
    assert tokenizer(text)["input_ids"].count(0) == 2  # the mistake this guards against


def test_tokenizer_without_a_template(tmp_path):
    source = write_jsonl(tmp_path / "data.jsonl", [{"problem": "P?", "answer": "1"}])

    class Bare:
        chat_template = None

    with pytest.raises(DataError, match="no chat template"):
        load_prompts(source, Bare(), max_prompt_tokens=99)


# -------------------------------------------------------------------------------------------------------------- batches


@given(n=st.integers(1, 40), size=st.integers(1, 40), seed=st.integers(0, 3), epochs=st.integers(1, 3), data=st.data())
def test_batches_make_epochs_without_repetition(n, size, seed, epochs, data):
    prompts = [Prompt(row, "", [], None) for row in range(n)]
    if size > n:
        with pytest.raises(DataError, match=f"a batch of {size} prompts from {n}"):
            batch(prompts, step=0, size=size, seed=seed)
        return
    steps = n // size
    batches = [batch(prompts, step=step, size=size, seed=seed) for step in range(epochs * steps)]
    for epoch in range(epochs):
        rows = [p.row for part in batches[epoch * steps : (epoch + 1) * steps] for p in part]
        assert len(rows) == steps * size == len(set(rows))
    step = data.draw(st.integers(0, epochs * steps - 1))  # any one again, out of order: nothing is remembered
    assert batch(prompts, step=step, size=size, seed=seed) == batches[step]


def test_batches_depend_on_seed_and_epoch():
    prompts = [Prompt(row, "", [], None) for row in range(64)]
    drawn = {
        tuple(p.row for p in batch(prompts, step=step, size=32, seed=seed)) for step in range(4) for seed in range(3)
    }
    assert len(drawn) == 12
    with pytest.raises(DataError):
        batch(prompts, step=0, size=0, seed=0)


# ----------------------------------------------------------------------------------------------------------- the module


def test_normalise_keeps_case_and_symbols():
    assert normalise(" a\u00a0 b\t") == "a b" and normalise("X") != normalise("x")
    assert normalise("x²") != normalise("x2")


def test_columns_come_in_order_of_trust():
    rows = [("f:1", {"gt": 1}), ("f:2", {"solution": "", "answer": 2})]
    found = choose_columns(rows, None, ("answer", "gt", "solution"), what="answer", source="f")
    assert found == ["answer", "gt", "solution"]


def test_import_is_light():
    code = "import sys, ada.data; print([m for m in ('torch', 'vllm', 'datasets', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
