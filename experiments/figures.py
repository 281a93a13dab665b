"""Runs everything in configs/figures.yaml on the toy, then draws the figures and writes the tables.

    python -m experiments.figures              # make figures: about an hour on two cores
    python -m experiments.figures --quick      # make figures-quick: a tenth of the steps, one seed; out/figures-quick/

Runs are processes of train.py with one thread each, as many side by side as there are cores. A run that is complete
is not run again, one that was killed goes on from its last checkpoint: so the same command finishes the job.
"""

import argparse
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

from ada import UserError, run_command, toy
from ada.curves import make_lines, read_metrics, read_run
from ada.options import parse_options
from ada.plot import plot_all, progress
from experiments import spurious
from experiments.results import PAGES, by_sampler, collect, refresh, tables
from train import Config

PLAN = Path("configs/figures.yaml")
LABELS = {
    "grpo": "grpo, n = 4",
    "grpo-24": "grpo, n = 24",
    "grpo-long": "grpo, n = 4, 480 steps",
    "passive": "passive",
    "two_stage": "two_stage",
    "pos": "pos",
    "balance": "balance",
    "signal": "signal",
    "memory": "memory",
}
MAIN = ["balance", "pos", "grpo", "grpo-24", "grpo-long", "passive", "two_stage"]  # the first gets the first colour
RULES = ["balance", "signal", "memory"]


@dataclass(frozen=True)
class Job:
    """One run of train.py."""

    set_name: str
    sampler: str  # with the suffix of its comparison
    seed: int
    arguments: list[str]
    model: str
    steps: int

    @property
    def name(self) -> str:
        return f"{self.set_name}-{self.sampler}-seed{self.seed}"

    def done(self, out: Path) -> bool:
        """Has the last step been logged?"""
        try:
            return read_metrics(out / self.name)[-1]["step"] == self.steps
        except (ValueError, IndexError):
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
    """The runs of a plan, those of the first seed first. Raises UserError for what train.py would refuse."""
    plan = yaml.safe_load(path.read_text())
    jobs = {}
    for comparison in plan["comparisons"]:
        for set_name, sampler in product(comparison["sets"], comparison["samplers"]):
            options = {**plan["options"], **plan["samplers"][sampler], **comparison.get("options", {})}
            arguments = [f"--config={plan['sets'][set_name]}", *(f"--{name}={options[name]}" for name in options)]
            config = parse_options(Config, arguments)
            steps = config.steps
            if quick:
                steps //= 10
                arguments += [f"--steps={steps}", f"--eval_every={config.eval_every // 2}"]
            for seed in range(1 if quick else comparison["seeds"]):
                name = sampler + comparison.get("suffix", "")
                job = Job(set_name, name, seed, [*arguments, f"--seed={seed}"], config.model, steps)
                jobs[job.name] = job  # once, if two comparisons have it
    return sorted(jobs.values(), key=lambda job: job.seed)


def run_all(jobs: list[Job], out: Path, processes: int) -> None:
    """Those that are not done, `processes` side by side. Raises UserError with what failed."""
    for model in sorted({job.model for job in jobs}):
        toy.locate(model)  # built here, rather than by one run while others wait for it
    waiting = [job for job in jobs if not job.done(out)]
    print(f"{len(jobs)} runs, {len(jobs) - len(waiting)} of them done; {processes} at a time; logs in {out}/logs")
    start = time.perf_counter()
    with ThreadPoolExecutor(processes) as pool:
        ending = as_completed([pool.submit(job.run, out) for job in waiting])
        failures = [run.result() for run in tqdm(ending, "runs", len(waiting)) if run.result()]
    print(f"{len(waiting)} runs in {(time.perf_counter() - start) / 60:.0f} min")
    if failures:
        raise UserError("; ".join([f"{len(failures)} runs failed; the same command tries them again", *failures]))


def draw(jobs: list[Job], out: Path, figures: Path) -> dict[str, dict]:
    """All figures, and results.json, into `figures`; returns what is in the latter."""
    figures.mkdir(parents=True, exist_ok=True)

    def folders(set_names: list[str], samplers: list[str]) -> list[Path]:
        chosen = [(set_name, sampler) for set_name in set_names for sampler in samplers]
        return [out / job.name for pair in chosen for job in jobs if (job.set_name, job.sampler) == pair]

    labels = {f"{set_name}-{name}": label for set_name in ("mixed", "hard") for name, label in LABELS.items()}
    plot_all(folders(["mixed", "hard"], MAIN), figures, labels)
    rules = make_lines([read_run(folder) for folder in folders(["mixed"], RULES)], labels)
    progress(rules).savefig(figures / "rules.png")
    results = collect([job.name for job in jobs], out, figures / "results.json")
    spurious.plot(by_sampler(results, "chains")).savefig(figures / "spurious.png")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the comparisons on the toy and draw the figures.")
    parser.add_argument("--plan", type=Path, default=PLAN, help="YAML file (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps, one seed; nothing goes into docs/")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="runs side by side (%(default)s)")
    args = parser.parse_args()
    out = Path("out/figures-quick" if args.quick else "out/figures")
    figures = out / "plots" if args.quick else Path("docs/figures")
    jobs = read_plan(args.plan, args.quick)
    run_all(jobs, out, args.processes)
    results = draw(jobs, out, figures)
    made = tables(results)
    if args.quick:
        print(*(f"{name}\n{table}\n" for name, table in made.items()), sep="\n")
    else:
        for page in PAGES:
            refresh(page, made)
    print(f"figures in {figures}")


if __name__ == "__main__":
    run_command(main)
