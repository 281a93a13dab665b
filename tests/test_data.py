"""Prompts: every kind of source, column, gold and broken row that real data sets have, and batches without state."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ada.data import (
    INSTRUCTION,
    LOGGED_PER_CAUSE,
    SYSTEM,
    ChatTemplate,
    DataConfig,
    DataError,
    batch,
    describe,
    load_prompts,
    load_tokenizer,
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
        how = {name: options.pop(name) for name in ("whole_rows", "on_drop") if name in options}
        source = rows if isinstance(rows, str) else write_jsonl(tmp_path / "data.jsonl", rows)
        return load_prompts(source, toy_tokenizer, DataConfig(**{"max_prompt_tokens": 1024} | options), **how)

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
    "gsm8k": ({"question": "How many?", "answer": "Half of 144 is\n144/2 = 72.\n#### 72"}, "72"),
    "deepmath": ({"question": "How many?", "final_answer": "72", "r1_solution_1": "So 72."}, "72"),
    "aime25": ({"Problem": "Which?", "Answer": "588", "ID": "2025-I-1"}, "588"),
    "expected": ({"problem": "What?", "expected_answer": "5", "generated_solution": "5"}, "5"),
    "bare solution": ({"problem": "What?", "solution": "42"}, "42"),
    "dapo": (
        {
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What now?"}],
            "reward_model": {"ground_truth": "34", "style": "rule"},
        },
        "34",
    ),
}
TEXTS = {"aime25": "Which?", "dapo": "What now?"}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_public_schemas(load, schema):
    row, gold = SCHEMAS[schema]
    [prompt], counts = load([row])
    assert prompt.gold == gold and counts["kept"] == 1
    expected = TEXTS.get(schema) or row.get("problem") or row.get("question") or row.get("prompt")
    assert problems([prompt]) == [expected] == [prompt.problem]


@pytest.mark.parametrize("missing", [None, float("nan"), "", []])
def test_solution_stands_in_for_a_missing_answer(load, missing):
    [prompt], _ = load([{"problem": "P?", "answer": missing, "solution": r"Hence \boxed{7}."}])
    assert prompt.gold == "7"


def test_annotated_answer_comes_before_the_solution(load):
    [prompt], _ = load([{"problem": "P?", "solution": r"\boxed{8}", "answer": "7"}])
    assert prompt.gold == "7"


def test_prose_of_a_solution_is_no_answer(load, caplog):
    proof = "The proof is easy and follows from this."
    rows = [{"problem": "P?", "solution": proof}, {"problem": "Q?", "solution": r"\boxed{1}"}]
    prompts, counts = load(rows)
    assert problems(prompts) == ["Q?"] and counts["gold_unreadable"] == 1
    assert "data.jsonl:1: dropped: solution: prose without a box" in caplog.text


@pytest.mark.parametrize("columns", [("task", "label"), ("extra.task", "extra.label"), ("TASK", "Label")])
def test_columns_can_be_named(load, columns):
    """--prompt_column and --answer_column: alone they count, in whatever case, and a dot goes into an object."""
    rows = [{"problem": "no", "task": "yes", "answer": "1", "label": "2", "extra": {"task": "yes", "label": 2}}]
    [prompt], _ = load(rows, prompt_column=columns[0], answer_column=columns[1])
    assert problems([prompt]) == ["yes"] and prompt.gold == "2"


def test_rows_may_differ_in_their_columns(load):
    """The annotation counts before the solution, row by row, wherever in the file the columns first appear."""
    rows = [{"problem": "P?", "gt": 1}, {"question": "Q?", "solution": r"\boxed{3}", "answer": 2}]
    assert [prompt.gold for prompt in load(rows)[0]] == ["1", "2"]


def test_whole_rows_are_for_a_reward_of_ones_own(load):
    """No answer column is asked for; the row is what the reward gets."""
    row = {"problem": "P?", "tests": ["assert True"]}
    [prompt], _ = load([row], whole_rows=True)
    assert prompt.gold == row


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
    prompts, counts = load([good, *bad, *unreadable, '{"problem": "half \\ud800", "answer": "1"}'])
    assert counts == {"read": 11, "kept": 1, "bad_row": 7, "gold_unreadable": 3, "duplicate": 0, "too_long": 0}
    lines = [record.message.split("data.jsonl:")[1].split(":")[0] for record in caplog.records]
    assert lines == [str(line) for line in range(2, 12)]
    assert "data.jsonl:11: dropped: not Unicode text: surrogates not allowed" in caplog.text
    assert describe(counts) == "1 of 11 rows: 7 bad row, 3 gold unreadable"


def test_a_flood_of_bad_rows_goes_to_the_info_level(load, caplog):
    caplog.set_level(logging.INFO)
    load([{"problem": "P?", "answer": "1"}] + [{"problem": None}] * (LOGGED_PER_CAUSE + 5))
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.WARNING] * LOGGED_PER_CAUSE + [logging.INFO] * 5


def test_duplicates_are_removed_whatever_their_spacing(load):
    texts = ["Find  $x$", "Find $x$\n", " Find $x$", "Find $X$", "caf\u00e9", "cafe\u0301"]
    prompts, counts = load([{"problem": text, "answer": i} for i, text in enumerate(texts)])
    assert [prompt.gold for prompt in prompts] == ["0", "3", "4"] and counts["duplicate"] == 3
    assert [prompt.prompt_id for prompt in prompts] == [0, 1, 2]


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


def test_json_array_json_lines_and_parquet_give_the_same(tmp_path, load):
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
    loaded = [load(str(tmp_path / file)) for file in files]
    assert len(loaded[0][0]) == 5 and all(each == loaded[0] for each in loaded)


UNUSABLE = {  # name of a file: (content, what is said)
    "array.json": ('[{"problem": "P?"},\n oops]', r"array\.json: bad JSON: .* line 2"),
    "latin.jsonl": ('{"problem": "caf\xe9"}\n', r"latin\.jsonl:1: bad JSON: 'utf-8'"),
    "third.jsonl": ('{"problem": "P?", "answer": "1"}\n\n{"problem": "Q?", ', r"third\.jsonl:3: bad JSON: "),
    "missing.jsonl": (None, r"missing\.jsonl: no such file"),
    "missing.parquet": (None, r"missing\.parquet: no such file"),
    "empty.jsonl": ("", r"empty\.jsonl: no rows"),
    "fake.parquet": ("no parquet", r"fake\.parquet: not a parquet file"),
    "table.csv": ("problem,answer\n", r"table\.csv: unknown kind of file"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_files(load, tmp_path, name):
    content, message = UNUSABLE[name]
    if content is not None:
        (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=message) as error:
        load(str(tmp_path / name))
    assert "\n" not in str(error.value)


def test_a_broken_line_is_one_bad_row_for_whoever_listens(load):
    """A preparation goes on where training would end, and is told of every row that went."""
    heard = []
    rows = [{"problem": "P?", "answer": "1"}, '{"problem": "Q?", ', {"problem": "P?", "answer": "1"}]
    prompts, counts = load(rows, on_drop=lambda cause, where, why: heard.append((cause, where.rpartition("/")[2])))
    assert len(prompts) == 1 and (counts["read"], counts["bad_row"], counts["duplicate"]) == (3, 1, 1)
    assert sorted(heard) == [("bad_row", "data.jsonl:2"), ("duplicate", "data.jsonl:3")]


def test_hugging_face_names(monkeypatch, load):
    """Through a stand-in for the Hub: which split is taken, and one line for whatever goes wrong there."""
    import datasets

    rows = datasets.Dataset.from_list([{"problem": "P?", "gt": "1"}])
    other = datasets.Dataset.from_list([{"problem": "Q?", "gt": "2"}])
    hub = {
        "a/one": datasets.DatasetDict(test=rows),
        "a/two": datasets.DatasetDict(test=other, train=rows),
        "a/unclear": datasets.DatasetDict(test=rows, dev=other),
    }

    def load_dataset(name, configuration, split=None):
        if name not in hub or configuration not in (None, "main"):
            raise ConnectionError("cannot reach\nthe Hub")
        return hub[name] if split is None else hub[name][split]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    for options, text in (({}, "P?"), ({"split": "test"}, "Q?"), ({"dataset_config": "main"}, "P?")):
        assert problems(load("a/two", **options)[0]) == [text]
    assert problems(load("a/one")[0]) == ["P?"]
    with pytest.raises(DataError, match="a/unclear: choose a --split; it has test, dev"):
        load("a/unclear")
    with pytest.raises(DataError, match="a/none: neither a file nor a data set that loads: cannot reach the Hub"):
        load("a/none")


def test_local_data_set_folder(tmp_path, monkeypatch, load):
    """The real `datasets` on a folder: no network."""
    (tmp_path / "folder").mkdir()
    write_jsonl(tmp_path / "folder" / "train.jsonl", [{"problem": "P?", "answer": "1"}])
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    assert problems(load(str(tmp_path / "folder"))[0]) == ["P?"]


# -------------------------------------------------------------------------------------------------------- chat template


TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
ASSISTANT = "{% if add_generation_prompt %}[assistant]{% endif %}"


@pytest.fixture
def llama_tokenizer():
    """One that adds a BOS itself, as Llama's does; its template, which the tests set, may write one, too."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = {token: i for i, token in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    inner = Tokenizer(models.BPE(alphabet, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


def test_template_gives_the_papers_messages_and_one_bos(llama_tokenizer):
    llama_tokenizer.chat_template = "{{ bos_token }}" + TURNS + ASSISTANT
    text, ids = ChatTemplate(llama_tokenizer, DataConfig())("1+1?")
    assert text == f"<s>[system]{SYSTEM}[user]1+1?{INSTRUCTION}[assistant]"
    assert ids.count(0) == 1 and llama_tokenizer.decode(ids) == text
    assert llama_tokenizer(text)["input_ids"].count(0) == 2  # the mistake this guards against


@pytest.mark.parametrize("date", ["date_string", "strftime_now('%d %b %Y')"])
def test_dates_in_a_template_are_frozen(llama_tokenizer, date):
    """Llama's writes today's: a run resumed tomorrow would train on other prompts."""
    llama_tokenizer.chat_template = "{{ " + date + " }}" + TURNS + ASSISTANT
    assert ChatTemplate(llama_tokenizer, DataConfig())("1+1?")[0].startswith("26 Jul 2024[system]")


@pytest.mark.parametrize(
    "template",
    [
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + TURNS,
        TURNS.replace("[{{", "{% if m.role != 'system' %}[{{").replace("{% endfor", "{% endif %}{% endfor"),
    ],
    ids=["refuses", "leaves out"],
)
def test_without_a_system_role_its_message_heads_the_users(llama_tokenizer, template):
    """Gemma's refuses it, Mistral's early ones left it out without a word."""
    llama_tokenizer.chat_template = template + ASSISTANT
    assert ChatTemplate(llama_tokenizer, DataConfig())("1?")[0] == f"[user]{SYSTEM}\n\n1?{INSTRUCTION}[assistant]"


def test_prompts_and_template_options_can_be_set(llama_tokenizer):
    llama_tokenizer.chat_template = TURNS + "{% if enable_thinking is false %}<think></think>{% endif %}" + ASSISTANT
    options = {
        "system_prompt": "Be brief.",
        "instruction": " Now.",
        "chat_template_kwargs": '{"enable_thinking": false}',
    }
    text, _ = ChatTemplate(llama_tokenizer, DataConfig(**options))("1?")
    assert text == "[system]Be brief.[user]1? Now.<think></think>[assistant]"


@pytest.mark.parametrize(
    "template, options, message",
    [
        (None, {}, "no chat template"),
        ("{{ messages[0].content }}" + ASSISTANT, {}, "leaves out the problem"),
        (TURNS, {}, "ignores add_generation_prompt"),
        ("{{ raise_exception('not\n today') }}", {}, "chat template fails: not today"),
        (TURNS + ASSISTANT, {"chat_template_kwargs": "{a}"}, "--chat_template_kwargs {a}: not a JSON object"),
        (TURNS + ASSISTANT, {"chat_template_kwargs": "3"}, "--chat_template_kwargs 3: not a JSON object"),
    ],
)
def test_templates_that_would_train_on_the_wrong_text_are_refused(llama_tokenizer, template, options, message):
    llama_tokenizer.chat_template = template
    with pytest.raises(DataError) as error:
        ChatTemplate(llama_tokenizer, DataConfig(**options))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_another_models_tokenizer_is_refused(load, toy_tokenizer, monkeypatch):
    """Ids beyond the embeddings would end in an index error deep inside the engine."""
    monkeypatch.setattr(toy_tokenizer, "n_embeddings", 200, raising=False)
    with pytest.raises(DataError, match="is beyond the model's 200: another's tokenizer"):
        load([{"problem": "1+1", "answer": "2"}])


def test_a_model_without_a_tokenizer(tmp_path):
    for model in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(DataError, match=f"--model {model}: ") as error:
            load_tokenizer(str(model))
        assert "\n" not in str(error.value)


# -------------------------------------------------------------------------------------------------------------- batches


@given(n=st.integers(1, 40), size=st.integers(1, 40), seed=st.integers(0, 3), epochs=st.integers(1, 3), data=st.data())
def test_batches_make_epochs_without_repetition(n, size, seed, epochs, data):
    prompts = [Prompt(i, "", [], None) for i in range(n)]
    if size > n:
        with pytest.raises(DataError, match=f"a batch of {size} prompts from {n}"):
            batch(prompts, step=0, size=size, seed=seed)
        return
    steps = n // size
    batches = [batch(prompts, step=step, size=size, seed=seed) for step in range(epochs * steps)]
    for epoch in range(epochs):
        ids = [p.prompt_id for part in batches[epoch * steps : (epoch + 1) * steps] for p in part]
        assert len(ids) == steps * size == len(set(ids))
    step = data.draw(st.integers(0, epochs * steps - 1))  # any one again, out of order: nothing is remembered
    assert batch(prompts, step=step, size=size, seed=seed) == batches[step]


def test_batches_depend_on_seed_and_epoch():
    prompts = [Prompt(i, "", [], None) for i in range(64)]
    batches = [batch(prompts, step=step, size=32, seed=seed) for step in range(4) for seed in range(3)]
    drawn = {tuple(prompt.prompt_id for prompt in drawn) for drawn in batches}
    assert len(drawn) == 12
    with pytest.raises(DataError):
        batch(prompts, step=0, size=0, seed=0)


# ----------------------------------------------------------------------------------------------------------- the module


def test_normalise_keeps_case_and_symbols():
    assert normalise(" a\u00a0 b\t") == "a b" and normalise("X") != normalise("x")
    assert normalise("x²") != normalise("x2")


def test_import_is_light():
    code = "import sys, ada.data; print([m for m in ('torch', 'vllm', 'datasets', 'transformers') if m in sys.modules])"
    root = Path(__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root).stdout == "[]\n"
