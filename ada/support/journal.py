"""k responses to each prompt, each on disk as soon as it is graded: what evaluation and scripts/prepare.py share.

    FOLDER/NAME.jsonl            a line a response with its verdict, in order of prompt and index
    FOLDER/NAME.rank0.jsonl      lines that rank 0 has added since; joined at the end, or at the next start
    FOLDER/NAME.settings.json    what they were drawn with; a start with other settings is refused

A killed command, started again, draws what is missing: no response that was graded is drawn again. Those that were
being generated come from the same seeds as before, so the files end up as if there had been no kill.
"""

import json
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ada import UserError
from ada.sampler import Pool, Prompt, Sample, SamplingConfig, by_prompt, exit_fixed, sample_adaptively
from ada.support.files import append_lines, digest, hold_lock, refuse_other_options, write_atomically
from ada.support.metrics import SamplingBar
from ada.support.ranks import Ranks


class Journal:
    """The responses to one list of prompts. Make it, and call draw_missing() and pools(), on all ranks.

    Args:
        path: FOLDER/NAME; rank 0 keeps the files.
        settings: what decides about responses, beside the prompts: model, k, temperature, max_tokens, seed, purpose.

    Raises:
        UserError: there are responses drawn with other settings or to other prompts, or another process is at work.
    """

    def __init__(self, path: Path, prompts: list[Prompt], settings: dict, ranks: Ranks):
        self.path = path
        self.prompts = prompts
        self.settings = settings
        self.ranks = ranks
        error = self._open() if ranks.rank == 0 else None
        if reason := ranks.gather([error])[0]:
            raise UserError(reason)  # on all ranks, so that none waits for the others
        drawn = Counter(ranks.gather([line["prompt_id"] for line in self._lines()] if ranks.rank == 0 else []))
        self.missing = [prompt for prompt in prompts if drawn[prompt.prompt_id] < settings["k"]]

    def _open(self) -> str | None:
        """Take the place, join what is there. Returns what is wrong with it."""
        content = [(prompt.text, prompt.gold) for prompt in self.prompts]
        settings = {**self.settings, "prompts": f"{len(self.prompts)}, {digest(content)}"}
        file = self._file("settings.json")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = hold_lock(self.path.parent / f".{self.path.name}.lock")
            refuse_other_options(file, settings, "give another --out")
            write_atomically(file, json.dumps(settings, indent=1) + "\n")
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
                    lines[line["prompt_id"], line["index"]] = text.decode()
        if parts:
            write_atomically(self._file("jsonl"), "".join(lines[key] for key in sorted(lines)))
        for part in parts:
            part.unlink()

    def draw_missing(self, engine, scorer, label: str) -> None:
        """Draw what is missing, together with the other ranks: the sampler of training with one round of k.

        Seeds and keys are those of the whole round, so what is on disk already is handed out instead of drawn.
        """
        k, purpose = self.settings["k"], self.settings["purpose"]
        config = SamplingConfig(group_size=k, round_size=k, seed=self.settings["seed"])
        prompts = {prompt.prompt_id: prompt for prompt in self.missing}
        lines = [line for line in self._lines() if line["prompt_id"] in prompts] if self.ranks.rank == 0 else []
        texts = {(line["prompt_id"], line["index"]): line["text"] for line in self.ranks.gather(lines)}
        own_file = self._file(f"rank{self.ranks.rank}.jsonl")

        def write(sample: Sample) -> None:
            if (sample.prompt_id, sample.index) not in texts:
                append_lines(own_file, [to_line(prompts[sample.prompt_id], sample)])
            sample.tokens, sample.logprobs, sample.text = [], [], ""  # on disk, and there may be millions

        with SamplingBar(label, self.ranks, total=k * len(prompts) // self.ranks.world_size) as bar:
            sample_adaptively(
                EngineWithMemory(engine, texts),
                scorer,
                self.ranks.share(self.missing, f"{purpose}/{self.path}"),
                config,
                exit_rule=exit_fixed,
                step=0,
                purpose=purpose,
                progress=lambda n_active, sample: (bar(n_active, sample), write(sample)),
            )
        self.ranks.barrier()
        if self.ranks.rank == 0:
            self._join()
        self.missing = []

    def pools(self) -> list[Pool]:
        """One pool a prompt, in order, without tokens; the same on every rank."""
        pools = {prompt.prompt_id: Pool(replace(prompt, text="", tokens=[]), rounds=1) for prompt in self.prompts}
        for line in self._lines() if self.ranks.rank == 0 else []:
            pools[line["prompt_id"]].samples.append(from_line(line))
        return self.ranks.gather(list(pools.values()) if self.ranks.rank == 0 else [], by_prompt)


class EngineWithMemory:
    """An engine that hands out the responses it is told of, without their tokens, and draws the others."""

    def __init__(self, engine, texts: dict[tuple[int, int], str]):
        self.engine, self.capacity = engine, engine.capacity
        self.texts = texts
        self.remembered: deque[Sample] = deque()
        self.n_running = 0

    def submit(self, key: tuple[int, int], tokens: list[int], seed: int) -> None:
        if key in self.texts:
            self.remembered.append(Sample(*key, [], [], self.texts[key], truncated=False))
        else:
            self.engine.submit(key, tokens, seed)
            self.n_running += 1

    def poll(self) -> list[Sample]:
        drawn = self.engine.poll() if self.n_running else []
        self.n_running -= len(drawn)
        remembered = list(self.remembered)
        self.remembered.clear()
        return remembered + drawn


def to_line(prompt: Prompt, sample: Sample) -> dict:
    """A response in the journal; `tokens` is their number, `logprob` their sum, in nats."""
    return {
        "prompt_id": prompt.prompt_id,
        "index": sample.index,
        "problem": prompt.problem,
        "gold": prompt.gold,
        "text": sample.text,
        "correct": sample.correct,
        "truncated": sample.truncated,
        "tokens": sample.n_tokens,
        "logprob": sample.logprob_sum,
    }


def from_line(line: dict) -> Sample:
    """The response without its tokens and text."""
    numbers = {"n_tokens": line["tokens"], "logprob_sum": line["logprob"]}
    return Sample(line["prompt_id"], line["index"], [], [], "", line["truncated"], line["correct"], **numbers)
