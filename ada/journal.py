"""k responses to each prompt, each on disk as soon as it is graded: what prepare.py and eval.py share.

    FOLDER/NAME.jsonl            a line a response with its verdict, in order of prompt and index
    FOLDER/NAME.rank0.jsonl      lines that rank 0 has added since; joined at the end, or at the next start
    FOLDER/NAME.settings.json    what they were drawn with; a start with other settings is refused

A killed command, started again, draws what is missing: no response that was graded is drawn again. Those that were
being generated come from the same seeds as before, so the files end up as if there had been no kill.
"""

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from ada import UserError, checkpoint, toy
from ada.data import shared_queue
from ada.reward import Scorer
from ada.run import SamplingBar, hold_lock, refuse_other_options
from ada.sampler import Pool, Prompt, Sample, by_row, exit_fixed, sample_adaptively
from ada.trainer import Ranks


def draw(
    engine,
    scorer,
    prompts: Iterable[Prompt],
    *,
    k: int,
    seed: int,
    step: int,
    purpose: str = "eval",
    progress: Callable[[int, Sample], None] | None = None,
) -> list[Pool]:
    """k responses per prompt: the sampler of training with one round and nothing to decide."""
    return sample_adaptively(
        engine,
        scorer,
        prompts,
        exit_rule=exit_fixed,
        n=k,
        round_size=k,
        max_rounds=1,
        seed=seed,
        step=step,
        purpose=purpose,
        progress=progress,
    )


class Journal:
    """The responses to one list of prompts. Make it, and call fill() and pools(), on all ranks; rank 0 keeps the files.

    Args:
        path: FOLDER/NAME.
        settings: what decides about responses, beside the prompts: model, k, temperature, max_tokens, seed, purpose.

    Raises:
        UserError: there are responses drawn with other settings or to other prompts, or somebody is at work here.
    """

    def __init__(self, path: Path, prompts: list[Prompt], settings: dict, ranks: Ranks):
        self.path = path
        self.prompts = prompts
        self.settings = settings
        self.ranks = ranks
        error = self._open() if ranks.rank == 0 else None
        if reason := ranks.gather([error])[0]:
            raise UserError(reason)  # on all ranks, so that none waits for the others
        drawn = Counter(ranks.gather([line["row"] for line in self._lines()] if ranks.rank == 0 else []))
        self.missing = [prompt for prompt in prompts if drawn[prompt.row] < settings["k"]]  # at least one response
        begun = {prompt.row for prompt in self.missing if drawn[prompt.row]}
        self.begun = ranks.gather(
            [line for line in self._lines() if line["row"] in begun] if ranks.rank == 0 and begun else []
        )

    def _open(self) -> str | None:
        """Take the place, join what is there. Returns what is wrong with it."""
        content = [(prompt.text, prompt.gold) for prompt in self.prompts]
        settings = {**self.settings, "prompts": f"{len(self.prompts)}, {digest(content)}"}
        file = self._file("settings.json")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = hold_lock(self.path.parent / f".{self.path.name}.lock")
            refuse_other_options(file, settings, "give another --out")
            checkpoint.write_atomically(file, json.dumps(settings, indent=1) + "\n")
            self._join()
        except UserError as error:
            return str(error)
        except OSError as error:
            return f"{self.path.parent}: {error.strerror}"
        return None

    def _file(self, ending: str) -> Path:
        return self.path.parent / f"{self.path.name}.{ending}"

    def _lines(self) -> Iterator[dict]:
        """What the joined file holds; nothing if there is none yet."""
        if self._file("jsonl").exists():
            with self._file("jsonl").open() as file:
                yield from map(json.loads, file)

    def _join(self) -> None:
        """All ranks' files into one. A line that a kill has cut short goes; a kill in here costs nothing."""
        parts = sorted(self.path.parent.glob(f"{self.path.name}.rank*.jsonl"))
        lines = {}
        for part in [self._file("jsonl"), *parts] if parts else []:
            for text in part.read_bytes().splitlines(keepends=True) if part.exists() else []:
                if text.endswith(b"\n"):
                    line = json.loads(text)
                    lines[line["row"], line["index"]] = text.decode()
        if parts:
            checkpoint.write_atomically(self._file("jsonl"), "".join(lines[key] for key in sorted(lines)))
        for part in parts:
            part.unlink()

    def fill(self, engine, scorer, label: str) -> None:
        """Draw what is missing, together with the other ranks."""
        k, seed, purpose = self.settings["k"], self.settings["seed"], self.settings["purpose"]
        prompts = {prompt.row: prompt for prompt in self.missing}
        resumed = Resumed(engine, self.begun)
        off = None if self.ranks.rank == 0 else True
        share = k * len(prompts) // self.ranks.world_size  # about as many as the other ranks
        with (
            self._file(f"rank{self.ranks.rank}.jsonl").open("a") as file,
            SamplingBar(label, off, total=share) as progress,
        ):

            def graded(n_active: int, sample: Sample) -> None:
                progress(n_active, sample)
                if (sample.row, sample.index) not in resumed.texts:
                    append(file, to_line(prompts[sample.row], sample))
                sample.tokens, sample.logprobs, sample.text = [], [], ""  # on disk, and there may be millions

            queue = shared_queue(self.missing, self.ranks.store, f"{purpose}/{self.path}")
            draw(resumed, scorer, queue, k=k, seed=seed, step=0, purpose=purpose, progress=graded)
        self.ranks.barrier()
        if self.ranks.rank == 0:
            self._join()
        self.missing, self.begun = [], []

    def pools(self) -> list[Pool]:
        """One pool a prompt, in order, like Pool.without_tokens; the same on every rank."""
        pools = {prompt.row: Pool(replace(prompt, text="", tokens=[]), rounds=1) for prompt in self.prompts}
        for line in self._lines() if self.ranks.rank == 0 else []:
            pools[line["row"]].samples.append(from_line(line))
        return self.ranks.gather(list(pools.values()) if self.ranks.rank == 0 else [], by_row)


class Resumed:
    """An engine that has some of the responses already: asked for one of these it hands it out, without its tokens."""

    def __init__(self, engine, lines: list[dict]):
        self.engine = engine
        self.capacity = engine.capacity
        self.texts = {(line["row"], line["index"]): line["text"] for line in lines}
        self._ready, self._n_running = [], 0

    def submit(self, key: tuple[int, int], tokens: list[int], seed: int) -> None:
        if key in self.texts:
            self._ready.append((key, [], [], self.texts[key], False))
        else:
            self.engine.submit(key, tokens, seed)
            self._n_running += 1

    def poll(self) -> list[tuple]:
        drawn = self.engine.poll() if self._n_running else []
        self._n_running -= len(drawn)
        ready, self._ready = self._ready, []
        return ready + drawn


def digest(content) -> str:
    """A short name for this and nothing else."""
    return hashlib.blake2b(repr(content).encode(), digest_size=8).hexdigest()


def append(file, line: dict) -> None:
    """Hand a line to the operating system, where no kill reaches it. Raises UserError where that fails (disk full)."""
    try:
        file.write(json.dumps(line) + "\n")
        file.flush()
    except OSError as error:
        raise UserError(f"{file.name}: {error.strerror}") from error


def to_line(prompt: Prompt, sample: Sample) -> dict:
    """A response in the journal; `tokens` is their number, `logprob` their sum, in nats."""
    return {
        "row": prompt.row,
        "index": sample.index,
        "problem": prompt.problem,
        "gold": prompt.gold,
        "text": sample.text,
        "correct": sample.correct,
        "truncated": sample.truncated,
        "tokens": len(sample.tokens),
        "logprob": sum(sample.logprobs),
    }


def from_line(line: dict) -> Sample:
    """The verdict, the length and the summed log-prob."""
    tokens, logprobs = range(line["tokens"]), [line["logprob"]]
    return Sample(line["row"], line["index"], tokens, logprobs, "", line["truncated"], line["correct"])


def fill(journals: list[Journal], folder: str, options: argparse.Namespace, ranks: Ranks) -> None:
    """Draw all that is missing, with one engine. On all ranks; once per process (see start_again in eval.py)."""
    from ada.engine import Engine  # vLLM takes 10 s to import: only when there is something to draw

    scorer = Scorer(options.graders)  # starts beside the engine
    settings = journals[0].settings
    engine = Engine(
        folder,
        max_tokens=settings["max_tokens"],
        max_prompt_tokens=max(len(prompt.tokens) for journal in journals for prompt in journal.prompts),
        temperature=settings["temperature"],
        capacity=options.max_concurrent,
        memory_share=options.gpu_memory_share,
        dtype=str(ranks.compute_dtype).removeprefix("torch."),
        cut_at_context=True,
    )
    scorer.wait_until_ready()
    for journal in journals:
        if journal.missing:
            if ranks.rank == 0:
                print(f"{journal.path}: the first prompt is {journal.missing[0].text!r}", flush=True)
            journal.fill(engine, scorer, f"{short_name(folder)} on {journal.path.name}")
    scorer.close()
    engine.close()


# ----------------------------------------------------------------------------------------------------------------
# Models and options


def find_model(name: str) -> str:
    """A folder or hub name: of the toy, of a training run (its newest checkpoint), else `name` itself."""
    newest = checkpoint.newest(Path(name) / "checkpoints")
    return str(newest / "hf") if newest else toy.locate(name)


def short_name(model: str) -> str:
    """Of a model, for tables and folders: out/RUN/checkpoints/step-000080/hf is RUN/step-000080.

    >>> short_name("out/toy-hard/checkpoints/step-000080/hf"), short_name("Qwen/Qwen2.5-Math-1.5B")
    ('toy-hard/step-000080', 'Qwen/Qwen2.5-Math-1.5B')
    """
    parts = [part for part in Path(model).parts if part not in ("checkpoints", "hf")]
    return "/".join(parts[-2:])


def settings_of(folder: str, options: argparse.Namespace, *, purpose: str, temperature: float) -> dict:
    """What a Journal is told about how its responses are drawn. A model folder counts as changed when its files are."""
    files = sorted(Path(folder).glob("*.safetensors"))
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return {
        "purpose": purpose,
        "model": folder,
        "weights": digest(stamps) if files else "of the hub",
        "k": options.k,
        "temperature": temperature,
        "max_tokens": options.max_tokens,
        "seed": options.seed,
    }


class Parser(argparse.ArgumentParser):
    """Options of a command that draws responses; what is wrong with them is one line."""

    def __init__(self, *, k: int, max_tokens: int, max_prompt_tokens: int, **options):
        super().__init__(allow_abbrev=False, **options)

        def add(name: str, default, help: str, type=count):
            self.add_argument(name, default=default, type=type, help=f"{help} (%(default)s)")

        add("--k", k, "responses per prompt")
        add("--max-tokens", max_tokens, "of a response; longer ones are cut and marked truncated")
        add("--max-prompt-tokens", max_prompt_tokens, "longer prompts are dropped and counted")
        add("--seed", 0, "everything random derives from it", type=int)
        add("--max-concurrent", 256, "responses that one engine generates side by side")
        add("--gpu-memory-share", 0.85, "of each GPU's memory, for vLLM", type=float)
        add("--graders", 1, "grading processes per rank")

    def error(self, message: str):
        raise UserError(message)


def count(text: str) -> int:
    """An option's value of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count: give 1 or more")
    return int(text)
