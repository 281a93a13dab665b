"""Runs everything in configs/figures.yaml on the toy, then draws the figures and writes the tables.

    python -m experiments.figures              # make figures: about an hour and a half on two cores
    python -m experiments.figures --quick      # a tenth of the steps, one seed; all of it in out/figures-quick/

Runs are processes of train.py with one thread each, as many side by side as there are cores. A run that is complete
is not run again, one that was killed goes on from its last checkpoint: so the same command finishes the job.
"""

import argparse
import dataclasses
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import yaml
from tqdm import tqdm

import toy
from ada import UserError, one_line, run_command
from ada.support.files import hold_lock, refuse_other_options
from ada.support.options import parse_options
from experiments.curves import make_lines, read_metrics, read_run
from experiments.plot import plot_all, progress_figure
from experiments.results import COMPARED, PAGES, RULES, SEEDS, by_sampler, collect, make_tables, refresh
from experiments.spurious import spurious_figure
from experiments.theory import write_method
from train import Config

PLAN = Path("configs/figures.yaml")
LABELS = {"grpo": "grpo, n = 4", "grpo-24": "grpo, n = 24", "grpo-long": "grpo, n = 4, 480 steps"}


@dataclass(frozen=True)
class Job:
    """One run of train.py."""

    set_name: str
    sampler: str  # with the suffix of its comparison
    arguments: list[str]
    config: Config  # what train.py makes of them

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def name(self) -> str:
        return f"{self.set_name}-{self.sampler}-seed{self.seed}"

    def done(self, out: Path) -> bool:
        """Has the last step been logged? Raises FileError if that was with other options."""
        options = dataclasses.asdict(self.config)
        kept = {key: options[key] for key in options if key == "steps" or key not in Config.may_change | {"name"}}
        refuse_other_options(out / self.name / "config.json", kept, "run it anew")
        try:
            return read_metrics(out / self.name)[-1]["step"] == self.config.steps
        except ValueError:
            return False

    def run(self, out: Path) -> str | None:
        """Run it; what it prints goes to a file in `out`/logs. Returns what went wrong, or None."""
        log = out / "logs" / f"{self.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "train.py", *self.arguments, f"--out={out}", f"--name={self.name}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with log.open("w") as file:
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment).returncode
        if code or not self.done(out):
            return f"{log}: exit status {code}: {' '.join(log.read_text().splitlines()[-1:])}"
        return None


def read_plan(path: Path, quick: bool) -> list[Job]:
    """The runs of a plan, those of the first seed first. Raises UserError, also for what train.py would refuse."""
    jobs = {}
    try:
        plan = yaml.safe_load(path.read_text())
        for comparison in plan["comparisons"]:
            for job in read_comparison(plan, **comparison, quick=quick):
                if jobs.setdefault(job.name, job) != job:
                    raise UserError(f"{path}: two different runs are called {job.name}")
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: {type(error).__name__}: {one_line(error)}") from error
    return sorted(jobs.values(), key=lambda job: job.seed)


def read_comparison(
    plan: dict, *, sets: list, samplers: list, seeds: int, suffix: str = "", options: dict | None = None, quick: bool
) -> list[Job]:
    jobs = []
    for set_name, sampler, seed in product(sets, samplers, range(1 if quick else seeds)):
        on_top = {**plan["options"], **plan["samplers"][sampler], **(options or {}), "seed": seed}
        arguments = [f"--config={plan['sets'][set_name]}", *(f"--{name}={value}" for name, value in on_top.items())]
        config = parse_options(Config, arguments)
        if quick:
            arguments += [f"--steps={config.steps // 10}", f"--eval_every={config.eval_every // 2}"]
            config = parse_options(Config, arguments)
        jobs.append(Job(set_name, sampler + suffix, arguments, config))
    return jobs


def run_all(jobs: list[Job], out: Path, processes: int) -> None:
    """Those that are not done, `processes` side by side. Raises UserError with what failed."""
    for model in sorted({job.config.model for job in jobs}):
        toy.build_if_missing(model)  # built here, rather than by one run while others wait for it
    waiting = [job for job in jobs if not job.done(out)]
    print(f"{len(jobs)} runs, {len(jobs) - len(waiting)} of them done; {processes} at a time; logs in {out}/logs")
    start = time.perf_counter()
    pool = ThreadPoolExecutor(processes)
    try:
        ending = as_completed([pool.submit(job.run, out) for job in waiting])
        failures = [run.result() for run in tqdm(ending, "runs", len(waiting)) if run.result()]
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C: those that run have heard it, too, and end; no more start
    print(f"{len(waiting)} runs in {(time.perf_counter() - start) / 60:.0f} min")
    if failures:
        raise UserError("; ".join([f"{len(failures)} runs failed; the same command tries them again", *failures]))


def draw_figures(jobs: list[Job], out: Path, figures: Path) -> dict[str, dict]:
    """All figures, and results.json, into `figures`; returns what is in the latter."""
    figures.mkdir(parents=True, exist_ok=True)

    def runs(set_names: tuple[str, ...], samplers: tuple[str, ...], seeds: int) -> list[Path]:
        chosen = [
            job
            for pair in product(set_names, samplers)
            for job in jobs
            if (job.set_name, job.sampler) == pair and job.seed < seeds
        ]
        return [out / job.name for job in chosen]

    write_method(figures)
    labels = {f"{job.set_name}-{job.sampler}": LABELS.get(job.sampler, job.sampler) for job in jobs}
    alike = ("grpo-std", "pos-long")  # to grpo and pos; seven lines are enough
    drawn = tuple(name for name in reversed(COMPARED) if name not in alike)
    plot_all(runs(("mixed", "hard"), drawn, SEEDS), figures, labels)
    rules = make_lines([read_run(folder) for folder in runs(("mixed",), RULES, len(jobs))], labels)
    progress_figure(rules).savefig(figures / "rules.png")
    results = collect([job.name for job in jobs], out, figures / "results.json")
    spurious_figure(by_sampler(results, "chains")).savefig(figures / "spurious.png")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the comparisons on the toy and draw the figures.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps, one seed; nothing goes into docs/")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="runs side by side (%(default)s)")
    args = parser.parse_args()
    out = Path("out/figures-quick" if args.quick else "out/figures")
    figures = out / "plots" if args.quick else Path("docs/figures")
    jobs = read_plan(PLAN, args.quick)
    out.mkdir(parents=True, exist_ok=True)
    lock = hold_lock(out / ".lock")  # noqa: F841  held until this process ends
    run_all(jobs, out, args.processes)
    made = make_tables(draw_figures(jobs, out, figures))
    if args.quick:
        print(*(f"{name}\n{table}\n" for name, table in made.items()), sep="\n")
    else:
        for page in PAGES:
            refresh(page, made)
    print(f"figures in {figures}")


if __name__ == "__main__":
    run_command(main)
