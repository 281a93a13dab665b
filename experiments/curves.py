"""Runs as lines of a figure: metrics against steps, samples or seconds, averaged over seeds. plot.py draws them."""

import json
import math
import re
import statistics
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np

METHOD = "sampler group_size round_size max_rounds baseline normalize_std keep_zero_variance".split()
NEEDED = "model train_data seed steps prompts_per_step sampler group_size max_rounds normalize_std".split()


@dataclass
class RunLog:
    """What a run left in its folder."""

    path: Path
    config: dict
    rows: list[dict]  # of metrics.jsonl


def read_file(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    return path.read_text(errors="replace")


def read_metrics(run: Path) -> list[dict]:
    """The objects of a run's metrics.jsonl, one a step.

    Raises:
        ValueError: there is no such file, nothing in it, or a line is not an object with a later step.
    """
    path, rows, last = run / "metrics.jsonl", [], -1
    for number, line in enumerate(read_file(path).splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise ValueError(f"{path}:{number}: not an object with a step")
        if row["step"] <= last:
            raise ValueError(f"{path}:{number}: step {row['step']} after step {last}")
        last = row["step"]
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: empty")
    return rows


def read_config(file: Path) -> dict:
    """A run's options under the names of today. Raises ValueError, naming the file."""
    try:
        config = json.loads(read_file(file))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: {error}") from error
    if missing := [key for key in NEEDED if key not in config]:
        raise ValueError(f"{file}: no {', '.join(missing)}")
    if "keep_uniform" in config:
        config["keep_zero_variance"] = config.pop("keep_uniform")
    for key in ("model", "train_data"):  # the toy's paths were toy-demo/model and toy-demo/train
        if re.fullmatch(r"toy-\w+/\w+", config[key]):
            config[key] = f"out/{config[key]}" + ("" if key == "model" else ".jsonl")
    config["sampler"] = config["sampler"].removeprefix("experiments.baselines:")
    if config["sampler"] == "grpo":  # whatever the options say, which it ignores
        config |= {"round_size": config["group_size"], "max_rounds": 1}
    return config


def read_run(path: Path) -> RunLog:
    """Metrics and config, and "per_prompt": samples per prompt of the batch. Raises ValueError, naming the file."""
    rows, config = read_metrics(path), read_config(path / "config.json")
    for row in rows:
        if "sampling/samples" in row:
            row["per_prompt"] = row["sampling/samples"] / config["prompts_per_step"]
    return RunLog(path, config, rows)


def method_of(run: RunLog) -> tuple:
    """How it samples and what it makes of the samples."""
    return tuple(run.config.get(key) for key in METHOD)


def series_of(run: RunLog, key: str, x: str = "step", window: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """x and values of a metric where it was measured, as a centred running mean over `window` measurements (odd).

    `x` is "step", or a metric that is added up: what all steps so far took of it, this one included.
    """
    at = [row["step"] for row in run.rows] if x == "step" else np.cumsum([row.get(x, 0) for row in run.rows])
    points = [(position, row[key]) for position, row in zip(at, run.rows, strict=True) if row.get(key) is not None]
    xs, values = np.array(points, dtype=float).reshape(-1, 2).T
    half = window // 2
    return xs, np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean of those that are not nan, and its standard error; nan where there are too few."""
    values = [value for value in values if not math.isnan(value)]
    mean = statistics.fmean(values) if values else math.nan
    return mean, statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


Average = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # x, mean, standard error (None of a single run)


def average(series: list[tuple[np.ndarray, np.ndarray]], shared: bool) -> Average:
    """Mean over runs and its standard error, up to the end of the shortest.

    With a `shared` x, that is steps, only those count at which all runs were measured. Samples and seconds are each
    run's own: there the values are interpolated linearly at the x of all of them.
    """
    grids = [xs for xs, _ in series]
    if not all(map(len, grids)):
        return np.array([]), np.array([]), None
    grid = reduce(np.intersect1d if shared else np.union1d, grids)
    grid = grid[(grid >= max(xs[0] for xs in grids)) & (grid <= min(xs[-1] for xs in grids))]
    values = np.array([np.interp(grid, xs, own) for xs, own in series])
    error = values.std(axis=0, ddof=1) / len(values) ** 0.5 if len(values) > 1 else None
    return grid, values.mean(axis=0), error


@dataclass
class Line:
    """Runs of one name and one way of sampling; they should differ in their seed alone."""

    label: str
    data: str  # the training prompts, as they can stand in a file's name
    runs: list[RunLog]
    style: int | None  # number of its colour and marker, the same for the same sampler; None is the base model's

    @property
    def config(self) -> dict:
        return self.runs[0].config

    @property
    def method(self) -> tuple:
        return method_of(self.runs[0])

    def average(self, key: str, x: str = "step", window: int = 1) -> Average:
        return average([series_of(run, key, x, window) for run in self.runs], shared=x == "step")

    def by_k(self, metric: str) -> Average:
        """k, mean and error of metric@1, metric@2, ... at the last evaluation that all runs share."""
        keys = {key for run in self.runs for row in run.rows for key in row if key.startswith(f"{metric}@")}
        averages = {int(key.partition("@")[2]): self.average(key) for key in keys}
        ks = sorted(k for k, (steps, *_) in averages.items() if len(steps))
        errors = [averages[k][2][-1] for k in ks if averages[k][2] is not None]
        return np.array(ks), np.array([averages[k][1][-1] for k in ks]), np.array(errors) if errors else None


def make_lines(runs: list[RunLog], labels: dict[str, str]) -> list[Line]:
    """Lines in order of first appearance, one for each name less -seedN and set of training prompts.

    Raises:
        ValueError: runs of one line have the same seed, or differ in how they sample; or two models were trained on
            the same prompts: there is only one base model in a figure.
    """
    grouped: dict[tuple[str, str], list[RunLog]] = {}
    models: dict[str, str] = {}
    for run in runs:
        name = re.sub(r"-seed\d+$", "", run.path.resolve().name)
        data = "-".join(Path(run.config["train_data"]).with_suffix("").parts[-2:])
        if models.setdefault(data, run.config["model"]) != run.config["model"]:
            raise ValueError(f"{run.path}: trained {run.config['model']}, others {models[data]}: draw them apart")
        grouped.setdefault((data, name), []).append(run)
    lines, samplers = [], []
    for (data, name), own in grouped.items():
        methods = {method_of(run) for run in own}
        if len(methods) > 1 or len({run.config["seed"] for run in own}) < len(own):
            folders = ", ".join(str(run.path) for run in own)
            raise ValueError(f"{folders}: one line, going by their names, but not one method with different seeds")
        sampler = labels.get(name) or methods.pop()
        alike = [
            other for other, line in zip(samplers, lines, strict=True) if line.data == data and other[0] == sampler
        ]
        samplers.append((sampler, len(alike)))  # within a set no two lines look the same
        lines.append(Line(labels.get(name, name), data, own, list(dict.fromkeys(samplers)).index(samplers[-1])))
    return lines


def base_of(lines: list[Line]) -> Line:
    """The model before training: the evaluations at step 0, one for each seed."""
    seeds = {run.config["seed"]: run for line in lines for run in line.runs}
    runs = [RunLog(run.path, run.config, [row for row in run.rows if row["step"] == 0]) for run in seeds.values()]
    return Line("before training", "", runs, style=None)


def plain_grpo(lines: list[Line]) -> Line | None:
    """GRPO without the division by the std; of several the one with the smallest groups, then with fewest steps."""
    plain = [line for line in lines if line.config["sampler"] == "grpo" and not line.config["normalize_std"]]
    return min(plain, key=lambda line: (line.config["group_size"], line.config["steps"]), default=None)


def gain(line: Line, baseline: Line, key: str) -> Average:
    """Difference of the means at the steps of both; its error takes the two for independent."""
    (steps, mean, error), (steps_0, mean_0, error_0) = line.average(key), baseline.average(key)
    steps, i, j = np.intersect1d(steps, steps_0, return_indices=True)
    return steps, mean[i] - mean_0[j], None if error is None or error_0 is None else np.hypot(error[i], error_0[j])
