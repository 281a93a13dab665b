"""Prompts: read, check the gold answer, deduplicate, put into the chat template, drop what is too long.

    prompts, counts = load_prompts("train.jsonl", tokenizer, DataConfig(max_prompt_tokens=1024))
    print(describe(counts))                                   # 1024 of 1100 rows: 70 duplicate, 6 too long
    for step in range(steps):
        todo = batch(prompts, step=step, size=512, seed=0)    # the same prompts whoever asks, resumed or not

Nothing is dropped in silence: each cause is counted, broken rows are logged with file and line. An answer that cannot
be read would pay every response or none, step after step; so its row goes, too.
"""

import datetime
import json
import logging
import random
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from ada import UserError, one_line, option
from ada.reward import GoldError, read_gold
from ada.sampler import Prompt, seed_of

log = logging.getLogger(__name__)

SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
INSTRUCTION = " Let's think step by step and output the final answer within \\boxed{}."

# Where problems and answers are looked for, in this order; a dot goes into an object. Of answers, per row the first
# that can be read: the annotation counts before the reference solution.
PROMPT_COLUMNS = ("problem", "question", "prompt")
ANSWER_COLUMNS = tuple("answer gt final_answer expected_answer ground_truth reward_model.ground_truth solution".split())
FILE_TYPES = (".jsonl", ".json", ".parquet")
LOGGED_PER_CAUSE = 20  # broken rows logged as warnings; the rest of them as info, like duplicates and long ones


@dataclass
class DataConfig:
    """Options of reading prompts."""

    max_prompt_tokens: int = option(32, "longer prompts, in the chat template, are dropped and counted", at_least=1)
    prompt_column: str = option("", f"column of the problem; by default the first of {', '.join(PROMPT_COLUMNS)}")
    answer_column: str = option("", f"column of the answer, A.B for B in A; by default {', '.join(ANSWER_COLUMNS)}")
    dataset_config: str = option("", "name of a Hugging Face data set's configuration")
    split: str = option("", "of a Hugging Face data set; by default its only one, or train")
    system_prompt: str = option(SYSTEM, "system message")
    instruction: str = option(INSTRUCTION, "follows the problem")
    chat_template_kwargs: str = option("{}", 'JSON object for the chat template, such as {"enable_thinking": false}')


class DataError(UserError):
    """A source that cannot be used; the message is one line for the user."""


Drop = Callable[[str, str, object], None]  # called with (cause, where, why) for each row that is dropped


# ----------------------------------------------------------------------------------------------------------------
# Rows


def read_rows(source: str, config: DataConfig, on_bad_line: Drop | None = None) -> Iterator[tuple[str, object]]:
    """Yields (where, row) from a JSONL, JSON or parquet file or a Hugging Face data set; where is for messages.

    Raises DataError if there is no such source, or at a line that isn't JSON; with `on_bad_line` it calls that and
    goes on.
    """
    path = Path(source)
    if path.suffix not in FILE_TYPES and not path.is_file():
        yield from read_hub(source, config)
    elif not path.is_file():
        raise DataError(f"{source}: no such file")
    elif path.suffix == ".parquet":
        yield from read_parquet(path)
    elif path.suffix in FILE_TYPES:
        yield from read_json(path, on_bad_line)
    else:
        raise DataError(f"{source}: unknown kind of file; these can be read: {', '.join(FILE_TYPES)}")


def read_json(path: Path, on_bad_line: Drop | None) -> Iterator[tuple[str, object]]:
    """One JSON value a line, or the whole file as one array. Files named .json come in both forms."""
    content = path.read_bytes()  # text mode would also cut lines at the odd carriage return in a string
    if path.suffix == ".json" and content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        try:
            yield from ((f"{path} row {i}", row) for i, row in enumerate(json.loads(content), 1))
        except ValueError as error:
            raise DataError(f"{path}: bad JSON: {error}") from error
        return
    for number, line in enumerate(content.split(b"\n"), 1):
        try:
            if line.strip():
                yield f"{path}:{number}", json.loads(line)
        except ValueError as error:  # JSONDecodeError, UnicodeDecodeError
            if not on_bad_line:
                raise DataError(f"{path}:{number}: bad JSON: {error}") from error
            on_bad_line("bad_row", f"{path}:{number}", DataError(f"bad JSON: {error}"))


def read_parquet(path: Path) -> Iterator[tuple[str, object]]:
    import pyarrow.parquet  # comes with datasets

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are among the second
        raise DataError(f"{path}: not a parquet file: {error}") from error
    yield from ((f"{path} row {i}", row) for i, row in enumerate(rows, 1))


def read_hub(name: str, config: DataConfig) -> Iterator[tuple[str, object]]:
    """A Hugging Face data set, or a local folder with one."""
    import datasets  # slow to import

    try:
        found = datasets.load_dataset(name, config.dataset_config or None, split=config.split or None)
    except Exception as error:  # Hub, network, file formats, loading scripts: whatever it is, the source is unusable
        raise DataError(f"{name}: neither a file nor a data set that loads: {one_line(error)}") from error
    if isinstance(found, dict):
        split = "train" if "train" in found else next(iter(found))
        if split != "train" and len(found) > 1:
            raise DataError(f"{name}: choose a --split; it has {', '.join(found)}")
        found = found[split]
    yield from ((f"{name} row {i}", row) for i, row in enumerate(found, 1))


def value_at(row: dict, column: str):
    """What a row has in a column, whatever the case of its name; a dot goes into an object. None if nothing.

    >>> value_at({"Problem": "1+1", "reward_model": {"ground_truth": "2"}}, "reward_model.ground_truth")
    '2'
    """
    value = row
    for name in column.split("."):
        names = {str(key).lower(): key for key in value} if isinstance(value, dict) else {}
        value = value[names[name.lower()]] if name.lower() in names else None
    return value


def choose_columns(rows: list, wanted: str, usual: tuple[str, ...], *, what: str, source: str) -> list[str]:
    """The columns to look for a value in. Raises DataError if no row has any of them."""
    if not rows:
        raise DataError(f"{source}: no rows")
    objects = [row for _, row in rows if isinstance(row, dict)]
    columns = [
        column
        for column in ([wanted] if wanted else usual)
        if any(value_at(row, column) is not None for row in objects)
    ]
    if not columns:
        present = ", ".join(dict.fromkeys(str(column) for row in objects for column in row)) or "no columns"
        raise DataError(f"{source}: no {what} column ({wanted or ', '.join(usual)}); it has: {present}")
    return columns


def find_problem(row, columns: list[str]) -> str:
    """The problem of a row; of a list of messages the last of the user. Raises DataError if it has none."""
    if not isinstance(row, dict):
        raise DataError(f"not an object but {str(row)[:80]!r}")
    value = next((value for column in columns if (value := value_at(row, column)) is not None), None)
    if isinstance(value, list):
        turns = [turn.get("content") for turn in value if isinstance(turn, dict) and turn.get("role") == "user"]
        value = turns[-1] if turns else None
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"no problem text in {', '.join(columns)}: {str(value)[:80]!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can write half of a surrogate pair
        raise DataError(f"not Unicode text: {error.reason}") from error
    return value.strip()


def find_gold(row: dict, columns: list[str]):
    """The gold answer: of the first column that can be read. Raises GoldError if there is none."""
    failures = []
    for column in columns:
        value = value_at(row, column)
        try:
            if value is None or value != value:  # pandas writes a missing answer as NaN
                raise GoldError("missing")
            text = str(value)
            words = re.findall(r"(?<!\\)\b[A-Za-z]{3,}", text)
            if column == "solution" and "\\boxed" not in text and len(words) > (2 if re.search(r"\d", text) else 0):
                raise GoldError("prose without a box")
            return read_gold(text.rpartition("####")[2] if "####" in text else value)  # GSM8K: .. #### 72
        except GoldError as error:
            failures.append(f"{column}: {error}")
    raise GoldError("; ".join(failures))


# ----------------------------------------------------------------------------------------------------------------
# Chat template


def load_tokenizer(model: str):
    """The tokenizer of a Hugging Face folder or name, with the model's `n_embeddings`. Raises DataError without one."""
    from transformers import AutoConfig, AutoTokenizer

    path = Path(model)
    if not path.is_dir() and (path.is_absolute() or Path(path.parts[0]).is_dir()):  # no hub name; do not ask the hub
        raise DataError(f"--model {model}: no such folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.n_embeddings = AutoConfig.from_pretrained(model).get_text_config().vocab_size
        return tokenizer
    except (OSError, ValueError) as error:
        raise DataError(f"--model {model}: {one_line(error)}") from error


class ChatTemplate:
    """A problem with the two sentences around it, as the model's chat template writes them.

    Raises:
        DataError: there is no template, or it leaves out what matters.
    """

    def __init__(self, tokenizer, config: DataConfig):
        self.tokenizer = tokenizer
        self.config = config
        # Some templates write today's date: a run resumed tomorrow would change its prompts.
        day = datetime.date(2024, 7, 26)
        self.options = {"date_string": day.strftime("%d %b %Y"), "strftime_now": day.strftime}
        try:
            self.options |= json.loads(config.chat_template_kwargs)
        except (ValueError, TypeError) as error:
            raise DataError(f"--chat_template_kwargs {config.chat_template_kwargs}: not a JSON object") from error
        if not tokenizer.chat_template:
            raise DataError("the tokenizer has no chat template: take an instruction-tuned model, or set one")
        self.has_system_role = True
        try:
            self.has_system_role = config.system_prompt in self._write("?")
        except Exception:  # the template's own "System role not supported", of whatever kind
            self.has_system_role = False
        try:
            text, unprompted = self._write("3+4-9"), self._write("3+4-9", add_generation_prompt=False)
        except Exception as error:
            raise DataError(f"the tokenizer's chat template fails: {one_line(error)}") from error
        if "3+4-9" not in text:
            raise DataError("the tokenizer's chat template leaves out the problem")
        if text == unprompted:
            raise DataError("the tokenizer's chat template ignores add_generation_prompt: nothing asks for an answer")

    def __call__(self, problem: str) -> tuple[str, list[int]]:
        """(text, token ids). The ids come from the template itself: tokenising the text would often give two BOS."""
        return self._write(problem), list(self._write(problem, tokenize=True, return_dict=False))

    def _write(self, problem: str, **how):
        system, user = self.config.system_prompt, problem + self.config.instruction
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        if not self.has_system_role:
            messages = [{"role": "user", "content": f"{system}\n\n{user}".lstrip()}]
        how = {"tokenize": False, "add_generation_prompt": True} | how
        return self.tokenizer.apply_chat_template(messages, **how, **self.options)


# ----------------------------------------------------------------------------------------------------------------
# Prompts


def normalise(text: str) -> str:
    """What makes two problems the same: their characters, whatever the spacing and Unicode composition.

    >>> normalise("Find  $x$\\n") == normalise("Find $x$")
    True
    """
    return " ".join(unicodedata.normalize("NFC", text).split())


def load_prompts(
    source: str,
    tokenizer,
    config: DataConfig,
    *,
    whole_rows: bool = False,
    max_problem_tokens: int | None = None,
    on_drop: Drop | None = None,
) -> tuple[list[Prompt], dict[str, int]]:
    """Reads a source into prompts whose prompt_id is their place in the list, and counts rows by what became of them.

    `gold` is the gold answer as read_gold gives it, or with `whole_rows` the row itself, for a reward of one's own.
    Of rows with the same problem (up to spacing) the first usable one is kept. max_prompt_tokens counts the prompt
    in the chat template, max_problem_tokens the problem alone. Dropped rows are logged as "FILE:LINE: why"; a line that
    isn't JSON ends the reading, unless there is an `on_drop`, which is called for it as for every other dropped row.

    Raises:
        DataError: the source, its columns or the chat template cannot be used, or no prompt remains.
    """
    template = ChatTemplate(tokenizer, config)
    counts = dict.fromkeys(("read", "kept", "bad_row", "gold_unreadable", "duplicate", "too_long"), 0)

    def drop(cause: str, where: str, why) -> None:
        counts[cause] += 1
        if on_drop:
            on_drop(cause, where, why)
        is_broken = isinstance(why, Exception)
        level = logging.WARNING if is_broken and counts[cause] <= LOGGED_PER_CAUSE else logging.INFO
        log.log(level, "%s: dropped: %s", where, why)

    rows = list(read_rows(source, config, drop if on_drop else None))
    counts["read"] = len(rows) + counts["bad_row"]
    prompt_columns = choose_columns(rows, config.prompt_column, PROMPT_COLUMNS, what="prompt", source=source)
    answer_columns = (
        [] if whole_rows else choose_columns(rows, config.answer_column, ANSWER_COLUMNS, what="answer", source=source)
    )
    prompts, seen = [], set()
    for where, row in tqdm(rows, desc="prompts", unit="row", delay=2, leave=False, disable=None):
        try:
            problem = find_problem(row, prompt_columns)
            if (key := normalise(problem)) in seen:
                drop("duplicate", where, "the same problem as in an earlier row")
                continue
            gold = row if whole_rows else find_gold(row, answer_columns)
            json.dumps(gold)  # as it goes to the graders
        except GoldError as error:
            drop("gold_unreadable", where, error)
            continue
        except (DataError, TypeError, ValueError) as error:  # the last two from JSON: dates, bytes and the like
            drop("bad_row", where, error)
            continue
        text, tokens = template(problem)
        n_problem = len(tokenizer.encode(problem, add_special_tokens=False))
        if len(tokens) > config.max_prompt_tokens or n_problem > (max_problem_tokens or n_problem):
            drop("too_long", where, f"{n_problem} tokens, {len(tokens)} in the template")
            continue
        seen.add(key)
        prompts.append(Prompt(len(prompts), text, tokens, gold, problem))
    counts["kept"] = len(prompts)
    if not prompts:
        raise DataError(
            f"{source}: no prompt left (max_prompt_tokens is {config.max_prompt_tokens}): {describe(counts)}"
        )
    largest = max(max(prompt.tokens) for prompt in prompts)
    if largest >= getattr(tokenizer, "n_embeddings", largest + 1):
        raise DataError(
            f"{source}: token {largest} is beyond the model's {tokenizer.n_embeddings}: another's tokenizer?"
        )
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
