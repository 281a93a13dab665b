"""Prompts: read, check the gold answer, deduplicate, put into the chat template, drop what is too long.

    prompts, counts = load_prompts("train.jsonl", tokenizer, max_prompt_tokens=1024)
    print(describe(counts))                                   # 1024 of 1100 rows: 70 duplicate, 6 too long
    for step in range(steps):
        todo = batch(prompts, step=step, size=512, seed=0)    # the same prompts whoever asks, resumed or not

Nothing is dropped in silence: each cause is counted, rows that are broken are logged with file and line. An answer that
cannot be read would pay every response or none, step after step; so its row goes too.
"""

import json
import logging
import math
import random
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from ada import UserError, one_line
from ada.reward import GoldError, read_gold
from ada.sampler import Prompt, seed_of

log = logging.getLogger(__name__)

SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
INSTRUCTION = " Let's think step by step and output the final answer within \\boxed{}."

PROMPT_COLUMNS = ("problem", "question", "prompt")
ANSWER_COLUMNS = ("answer", "gt", "final_answer", "solution")  # per row the first that can be read
FILE_TYPES = (".jsonl", ".json", ".parquet")
LOGGED_PER_CAUSE = 20  # broken rows logged as warnings; the rest of them as info, like duplicates and long ones


class DataError(UserError):
    """A source that cannot be used; the message is one line for the user."""


# ----------------------------------------------------------------------------------------------------------------
# Rows


def read_rows(source: str, split: str | None = None, *, forgive_lines: bool = False) -> Iterator[tuple[str, object]]:
    """Yields (where, row) from a JSONL, JSON or parquet file or a Hugging Face data set; where is for messages.

    Raises DataError if there is no such source, or it has a line that isn't JSON. With `forgive_lines` such a line's
    error is yielded in place of its row.
    """
    path = Path(source)
    if path.suffix not in FILE_TYPES and not path.is_file():
        yield from read_hub(source, split)
    elif not path.is_file():
        raise DataError(f"{source}: no such file")
    elif path.suffix == ".parquet":
        yield from read_parquet(path)
    elif path.suffix in FILE_TYPES:
        yield from read_json(path, forgive_lines)
    else:
        raise DataError(f"{source}: unknown kind of file; these can be read: {', '.join(FILE_TYPES)}")


def read_json(path: Path, forgive_lines: bool) -> Iterator[tuple[str, object]]:
    """One JSON value a line, or the whole file as one array. Files named .json come in both forms."""
    with open(path, "rb") as file:  # bytes: text mode would also cut lines at the odd carriage return in a string
        is_array = path.suffix == ".json" and file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        file.seek(0)
        if is_array:
            rows = parse_json(file.read())
            if isinstance(rows, DataError):
                raise DataError(f"{path}: {rows}")
            yield from ((f"{path} row {i}", row) for i, row in enumerate(rows, 1))
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                row = parse_json(line)
                if isinstance(row, DataError) and not forgive_lines:
                    raise DataError(f"{path}:{number}: {row}")
                yield f"{path}:{number}", row


def parse_json(text: bytes):
    """The value, or a DataError that says what is wrong with the text."""
    try:
        return json.loads(text)
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError
        return DataError(f"bad JSON: {error}")


def read_parquet(path: Path) -> Iterator[tuple[str, object]]:
    import pyarrow.parquet  # comes with datasets

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are among the second
        raise DataError(f"{path}: not a parquet file: {error}") from error
    yield from ((f"{path} row {i}", row) for i, row in enumerate(rows, 1))


def read_hub(name: str, split: str | None) -> Iterator[tuple[str, object]]:
    """A Hugging Face data set, or a local folder with one. Without `split`: its only one, else "train"."""
    import datasets  # slow to import

    try:
        found = datasets.load_dataset(name, split=split)
    except Exception as error:  # Hub, network, file formats, loading scripts: whatever it is, the source is unusable
        raise DataError(f"{name}: neither a file nor a data set that loads: {one_line(error)}") from error
    if isinstance(found, dict):
        split = "train" if "train" in found else next(iter(found))
        if split != "train" and len(found) > 1:
            raise DataError(f"{name}: choose a split; it has {', '.join(found)}")
        found = found[split]
    yield from ((f"{name} row {i}", row) for i, row in enumerate(found, 1))


def choose_columns(rows: list, wanted: str | None, usual: tuple[str, ...], *, what: str, source: str) -> list[str]:
    """The columns to look for a value in, most trusted first. Raises DataError if no row has any of them."""
    if not rows:
        raise DataError(f"{source}: no rows")
    present = {column: None for _, row in rows if isinstance(row, dict) for column in row}  # in order of appearance
    columns = [column for column in ([wanted] if wanted else usual) if column in present]
    if not columns:
        missing = f'"{wanted}"' if wanted else f"{', '.join(usual)}"
        raise DataError(f"{source}: no {what} column ({missing}); it has: {', '.join(present) or 'no columns'}")
    return columns


# ----------------------------------------------------------------------------------------------------------------
# Prompts


def apply_template(tokenizer, problem: str) -> tuple[str, list[int]]:
    """The prompt of the paper as the model's chat template writes it: (text, token ids).

    The ids come from the template itself. Tokenising the text again would give a second BOS with many tokenizers.
    """
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem + INSTRUCTION}]
    # Llama 3.2's template writes today's date unless it gets one, so a run resumed tomorrow would change its prompts.
    options = {"add_generation_prompt": True, "date_string": "26 Jul 2024"}
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return text, list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options))


def load_tokenizer(model: str):
    """The tokenizer of a Hugging Face folder or name. Raises DataError if there is none."""
    from transformers import AutoTokenizer

    path = Path(model)
    if not path.is_dir() and (path.is_absolute() or Path(path.parts[0]).is_dir()):  # no hub name; do not ask the hub
        raise DataError(f"--model {model}: no such folder")
    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise DataError(f"--model {model}: {one_line(error)}") from error


def normalise(text: str) -> str:
    """What makes two problems the same: their characters, whatever the spacing and Unicode composition.

    >>> normalise("Find  $x$\\n") == normalise("Find $x$")
    True
    """
    return " ".join(unicodedata.normalize("NFC", text).split())


def find_problem(row, columns: list[str]) -> str:
    """The problem of a row. Raises DataError if it has none."""
    if isinstance(row, DataError):
        raise row
    if not isinstance(row, dict):
        raise DataError(f"not an object but {str(row)[:80]!r}")
    value = next((row[column] for column in columns if row.get(column) is not None), None)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"no problem text in {', '.join(columns)}: {str(value)[:80]!r}")
    return value.strip()


def find_gold(row: dict, columns: list[str]):
    """The gold answer: of the first column that can be read. Raises GoldError if there is none.

    The annotation counts before the reference solution's box, and the box where the annotation is null or unreadable.
    """
    failures = []
    for column in columns:
        value = row.get(column)
        try:
            if value is None or value != value:  # pandas writes a missing answer as NaN
                raise GoldError("missing")
            if column == "solution" and "\\boxed" not in str(value):  # its prose is no answer
                raise GoldError("no \\boxed{}")
            return read_gold(value)
        except GoldError as error:
            failures.append(f"{column}: {error}")
    raise GoldError("; ".join(failures))


def check_json(row: dict) -> dict:
    """The row, which goes to the graders as JSON. Raises DataError if it holds dates, bytes or the like."""
    try:
        json.dumps(row)
    except (TypeError, ValueError) as error:
        raise DataError(f"not JSON: {error}") from error
    return row


def load_prompts(
    source: str,
    tokenizer,
    *,
    max_prompt_tokens: int,
    split: str | None = None,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    whole_rows: bool = False,
    max_problem_tokens: float = math.inf,
    fatal: str = "lines",
) -> tuple[list[Prompt], dict[str, int]]:
    """Reads a source into prompts whose `row` is their place in the list, and counts rows read, kept, dropped by cause.

    `gold` is the gold answer as read_gold gives it, or with `whole_rows` the row itself, for a reward of one's own.
    Of rows with the same problem (up to spacing) the first usable one is kept. max_prompt_tokens counts the prompt
    after the chat template, max_problem_tokens the problem alone. Dropped rows are logged as "FILE:LINE: why". `fatal`
    says what ends the reading instead: "nothing", "lines" that aren't JSON, or "rows", every broken one among them.
    Raises DataError if the source or its columns cannot be read, at what is fatal, if the tokenizer has no chat
    template, and if no prompt remains.
    """
    if not tokenizer.chat_template:
        raise DataError("the tokenizer has no chat template: take an instruction-tuned model, or set one")
    rows = list(read_rows(source, split, forgive_lines=fatal != "lines"))
    prompt_columns = choose_columns(rows, prompt_column, PROMPT_COLUMNS, what="prompt", source=source)
    answer_columns = (
        [] if whole_rows else choose_columns(rows, answer_column, ANSWER_COLUMNS, what="answer", source=source)
    )
    prompts, seen = [], set()
    counts = {"read": len(rows), "kept": 0, "bad_row": 0, "gold_unreadable": 0, "duplicate": 0, "too_long": 0}

    def drop(cause: str, where: str, why):
        broken = isinstance(why, Exception)
        if broken and fatal == "rows":
            raise DataError(f"{where}: {why}") from why
        counts[cause] += 1
        level = logging.WARNING if broken and counts[cause] <= LOGGED_PER_CAUSE else logging.INFO
        log.log(level, "%s: dropped: %s", where, why)

    for where, row in tqdm(rows, desc="prompts", unit="row", delay=2, leave=False, disable=None):
        try:
            problem = find_problem(row, prompt_columns)
            if (key := normalise(problem)) in seen:
                drop("duplicate", where, "the same problem as in an earlier row")
                continue
            gold = check_json(row) if whole_rows else find_gold(row, answer_columns)
        except GoldError as error:
            drop("gold_unreadable", where, error)
            continue
        except DataError as error:
            drop("bad_row", where, error)
            continue
        text, tokens = apply_template(tokenizer, problem)
        n_problem = len(tokenizer.encode(problem, add_special_tokens=False))
        if len(tokens) > max_prompt_tokens or n_problem > max_problem_tokens:
            drop("too_long", where, f"{n_problem} tokens, {len(tokens)} in the template")
            continue
        seen.add(key)
        prompts.append(Prompt(row=len(prompts), text=text, tokens=tokens, gold=gold, problem=problem))
    counts["kept"] = len(prompts)
    if not prompts:
        raise DataError(f"{source}: no prompt left (max_prompt_tokens is {max_prompt_tokens}): {describe(counts)}")
    return prompts, counts


def describe(counts: dict[str, int]) -> str:
    """One line for the user.

    >>> describe({"read": 9, "kept": 6, "bad_row": 0, "gold_unreadable": 0, "duplicate": 2, "too_long": 1})
    '6 of 9 rows: 2 duplicate, 1 too long'
    """
    dropped = [f"{n} {cause.replace('_', ' ')}" for cause, n in counts.items() if cause not in ("read", "kept") and n]
    return f"{counts['kept']} of {counts['read']} rows" + (": " + ", ".join(dropped) if dropped else "")


def batch(prompts: list[Prompt], *, step: int, size: int, seed: int) -> list[Prompt]:
    """The prompts of a step: a function of its arguments alone, so resuming needs no state.

    Each epoch is a fresh permutation; what doesn't fill a batch at its end is left out. Raises DataError if even one
    batch cannot be filled, rather than repeat prompts within it.
    """
    if not 1 <= size <= len(prompts):
        raise DataError(f"a batch of {size} prompts from {len(prompts)}: ask for fewer a step (--prompts_per_step)")
    epoch, i = divmod(step, len(prompts) // size)
    order = list(range(len(prompts)))
    random.Random(seed_of("shuffle", seed, epoch)).shuffle(order)
    return [prompts[j] for j in order[i * size : (i + 1) * size]]


def shared_queue(prompts: list[Prompt], store, name: str) -> Iterator[Prompt]:
    """Yields the prompts that no other rank has taken from the queue `name` yet, until there are none.

    `store` is the ranks' torch.distributed store: its add() is atomic. A name is good for one pass over the prompts.
    """
    while (taken := store.add(name, 1)) <= len(prompts):
        yield prompts[taken - 1]


if __name__ == "__main__":
    import sys

    from ada.prepare import main  # needs torch, which nothing else in this file does

    main(sys.argv[1:])
