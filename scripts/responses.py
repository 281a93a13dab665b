"""k responses to each prompt, on disk as soon as a prompt has all of them: for evaluate.py and prepare.py.

    FOLDER/NAME-DIGEST.rank0.jsonl      a line a response with its verdict, those that rank 0 drew
    FOLDER/NAME-DIGEST.json             what they were drawn with, of which DIGEST is a short form

A killed command, started again, draws what is missing, from the same seeds: it ends as if there had been no kill. With
other settings, prompts or weights the digest is another, and everything is drawn anew, beside what is there.
"""

import contextlib
import json
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from ada import option
from ada.data import DataConfig
from ada.engine import Engine, EngineConfig
from ada.reward import Scorer
from ada.sampler import Pool, Prompt, Sample, SamplingConfig, exit_fixed, sample_adaptively
from ada.support import checkpoint
from ada.support.files import FileError, append_lines, digest, write_atomically
from ada.support.metrics import SamplingBar, grading_failures
from ada.support.ranks import Ranks


@dataclass
class DrawConfig(EngineConfig, DataConfig):
    """Options of a command that draws k responses to each prompt of some data."""

    k: int = option(32, "responses per prompt", at_least=1)
    max_response_tokens: int = option(4096, "longer responses are cut and marked truncated", at_least=1)
    max_prompt_tokens: int = option(2048, "longer prompts, in the chat template, are dropped and counted", at_least=1)
    gpu_memory_share: float = option(0.85, "of each GPU's memory, for vLLM", above=0, below=1)
    graders: int = option(1, "grading processes per rank", at_least=1)
    seed: int = option(0, "everything random derives from it", at_least=0)
    config: str = option("", "YAML file of options")


KEPT = ("prompt_id", "index", "text", "correct", "truncated", "n_tokens", "logprob_sum")


class Journal:
    """The responses to one list of prompts. Make it, and call draw_missing(), on all ranks; they share a file system.

    Args:
        path: FOLDER/NAME.
        settings: what decides about responses, beside the prompts: model, k, temperature, seed, purpose ...
    """

    def __init__(self, path: Path, prompts: list[Prompt], settings: dict, ranks: Ranks):
        self.prompts = prompts
        self.settings = settings | {"prompts": digest([(prompt.text, prompt.gold) for prompt in prompts])}
        self.path = path.with_name(f"{path.name}-{digest(self.settings)}")
        self.ranks = ranks
        ranks.on_rank_0(self._write_settings)

    def _write_settings(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file("json"), json.dumps(self.settings, indent=1) + "\n")
        except OSError as error:
            raise FileError(f"{self.path.parent}: {error.strerror}") from error

    def _file(self, ending: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{ending}")

    def pools(self) -> list[Pool]:
        """One pool for each prompt that has all its responses, in order, without tokens and text."""
        samples: dict[int, dict[int, Sample]] = defaultdict(dict)
        for path in self.path.parent.glob(f"{self.path.name}.rank*.jsonl"):
            for text in path.read_text().splitlines():
                with contextlib.suppress(ValueError, KeyError):  # a line that a kill has cut short, and what follows it
                    line = json.loads(text)
                    sample = Sample(**{name: line[name] for name in KEPT} | {"text": ""}, tokens=[], logprobs=[])
                    samples[sample.prompt_id][sample.index] = sample
        return [
            Pool(replace(prompt, text="", tokens=[]), [own[i] for i in range(self.settings["k"])], rounds=1)
            for prompt in self.prompts
            if len(own := samples[prompt.prompt_id]) == self.settings["k"]
        ]

    def missing(self) -> list[Prompt]:
        """The prompts that lack responses."""
        complete = {pool.prompt.prompt_id for pool in self.pools()}
        return [prompt for prompt in self.prompts if prompt.prompt_id not in complete]

    def draw_missing(self, engine, scorer, label: str) -> None:
        """Draw what is missing, together with the other ranks: the sampler of training with one round of k."""
        k, purpose, missing = self.settings["k"], self.settings["purpose"], self.missing()
        config = SamplingConfig(group_size=k, round_size=k, seed=self.settings["seed"])
        prompts = {prompt.prompt_id: prompt for prompt in missing}
        lines: dict[int, list[dict]] = defaultdict(list)
        own_file = self._file(f"rank{self.ranks.rank}.jsonl")
        self.ranks.barrier()  # all know what is missing
        if own_file.exists():
            append_lines(own_file, [{}])  # ends a line that a kill has cut short

        def graded(n_active: int, sample: Sample) -> None:
            bar(n_active, sample)
            prompt, own = prompts[sample.prompt_id], lines[sample.prompt_id]
            own.append(
                {name: getattr(sample, name) for name in KEPT} | {"problem": prompt.problem, "gold": prompt.gold}
            )
            sample.tokens, sample.logprobs, sample.text = [], [], ""  # there may be millions
            if len(own) == k:
                append_lines(own_file, lines.pop(sample.prompt_id))

        with SamplingBar(label, self.ranks, total=k * len(missing) // self.ranks.world_size) as bar:
            queue = self.ranks.share(missing, f"{purpose}/{self.path}")
            sample_adaptively(
                engine, scorer, queue, config, exit_rule=exit_fixed, step=0, purpose=purpose, progress=graded
            )
        self.ranks.barrier()  # all have written


def draw_missing(journals: list[Journal], folder: str, config: DrawConfig, ranks: Ranks) -> None:
    """Draw all that is missing, with one engine. On all ranks; once per process (see start_again)."""
    scorer = Scorer(config.graders)  # starts beside the engine
    longest = max(len(prompt.tokens) for journal in journals for prompt in journal.prompts)
    engine = Engine(folder, config, max_prompt_tokens=longest, dtype=ranks.compute_dtype, cut_at_context=True)
    scorer.wait_until_ready()
    for journal in journals:
        if missing := journal.missing():
            if ranks.rank == 0:
                print(f"{journal.path}: the first prompt is {missing[0].text!r}", flush=True)
            journal.draw_missing(engine, scorer, f"{short_name(folder)} on {journal.path.name}")
    failed = {cause: n for cause, n in grading_failures(scorer, ranks).items() if n}
    if failed and ranks.rank == 0:
        print(f"wrong because grading failed: {failed}")
    scorer.close()
    engine.close()


def settings_of(folder: str, config: DrawConfig, purpose: str) -> dict:
    """What a Journal is told about how its responses are drawn; a model folder counts as changed when its files are."""
    files = [file for file in sorted(Path(folder).glob("*")) if file.suffix in (".safetensors", ".bin", ".json")]
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return {
        "purpose": purpose,
        "model": folder,
        "files": digest(stamps) if files else "of the hub",
        "k": config.k,
        "temperature": config.temperature,
        "max_response_tokens": config.max_response_tokens,
        "seed": config.seed,
    }


def find_model(name: str) -> str:
    """A folder or hub name: of a training run its newest checkpoint, else `name` itself."""
    newest = checkpoint.newest(Path(name) / "checkpoints")
    return str(newest / "hf") if newest else name


def short_name(model: str) -> str:
    """Of a model, for tables and folders: out/RUN/checkpoints/step-000080/hf is RUN/step-000080.

    >>> short_name("out/toy-hard/checkpoints/step-000080/hf"), short_name("Qwen/Qwen2.5-Math-1.5B")
    ('toy-hard/step-000080', 'Qwen/Qwen2.5-Math-1.5B')
    """
    parts = [part for part in Path(model).parts if part not in ("checkpoints", "hf")]
    return "/".join(parts[-2:])
