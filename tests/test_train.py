"""The real command, at a tiny size: real vLLM, real math-verify, real FSDP2, real files. And its options."""

import dataclasses
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import Command, Done, cold, read, torchrun
from safetensors.torch import load_file

import train
from ada import UserError
from ada.sampler import Prompt, exit_pos
from ada.support.options import OptionError, find_function, parse_options
from ada.support.ranks import Ranks
from ada.support.run import Run, RunError
from scripts.evaluate import EvalConfig

TINY = "--prompts_per_step=8 --eval_k=2 --eval_every=2 --save_every=2 --log_prompts=8".split()
FROM_THE_CLOCK = ("time/", "memory/")
NAME = "toy-balance-seed0"

FIXED_KEYS = """step reward/first_round reward/pool reward/kept policy/entropy
    sampling/samples sampling/tokens sampling/uniform_at_n sampling/uniform_after sampling/unresolved_no_right
    sampling/unresolved_no_wrong sampling/right_in_two_rounds sampling/resolved_in_two_rounds
    update/groups update/clip_high update/clip_low update/grad_norm grading/timeout
    engine/logprob_gap_max engine/logprobs_not_finite response/length response/truncated
    time/step time/sampling time/update time/sync""".split()


def start(out: Path, *options: str, script: str = "train.py", **how) -> Command:
    return Command(script, *TINY, f"--out={out}", *options, **how)


def launch(out: Path, *options: str, **how) -> Done:
    return start(out, *options, **how).wait()


def without_clock(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if not key.startswith(FROM_THE_CLOCK)} for row in rows]


def weights(folder: Path, step: int) -> dict:
    return load_file(folder / f"checkpoints/step-{step:06d}/hf/model.safetensors")


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory, toy_folder):
    """An uninterrupted run of 4 steps on one rank, and what it printed."""
    out = tmp_path_factory.mktemp("four")
    done = launch(out, "--steps=4")
    assert done.returncode == 0, done.stderr
    return out / NAME, done.stdout


def test_it_writes_and_prints_what_it_promises(four_steps, toy_folder):
    folder, printed = four_steps
    rows = read(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert {"eval/reward", "eval/pass@2", "eval/grading/timeout"} <= rows[0].keys() & rows[2].keys() & rows[4].keys()
    for row in rows[1:]:
        assert set(FIXED_KEYS) <= row.keys()
        assert row["engine/logprob_gap_max"] is None or row["engine/logprob_gap_max"] < 1e-3
    samples = read(folder / "samples.jsonl")
    assert {line["step"] for line in samples} == {1, 2, 3, 4}
    assert sum(line["step"] == 3 for line in samples) == rows[3]["sampling/samples"]
    assert sum(line["advantage"] is not None for line in samples if line["step"] == 3) == 4 * rows[3]["update/groups"]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000002", "step-000004"]
    assert (folder / "plot.png").stat().st_size > 10_000
    for words in ("<|assistant|>", "a response to ", "held out", "step 4", "step-000004", "plot.png"):
        assert words in printed
    base, trained = load_file(toy_folder / "model" / "model.safetensors"), weights(folder, 4)
    assert base.keys() == trained.keys()
    assert all((base[name] != trained[name]).any() for name in base)


def test_two_steps_and_two_more_are_four(four_steps, tmp_path):
    """Bit for bit, also where the last checkpoint was cut short and steps after the one before it had been logged."""
    folder, (whole, _) = tmp_path / NAME, four_steps
    assert launch(tmp_path, "--steps=2").returncode == 0
    with (folder / "metrics.jsonl").open("a") as log:
        log.write('{"step": 3, "reward/pool": 7}\n{"step": 4, "rew')
    (folder / "checkpoints/step-000004.tmp/state").mkdir(parents=True)
    for said in ("step-000002", "step-000004"):  # the second time there is nothing to do but to report
        done = launch(tmp_path, "--steps=4")
        assert done.returncode == 0, done.stderr
        assert re.search(f"continuing from .*{said}\n", done.stdout) and "held out" in done.stdout
        assert without_clock(read(folder / "metrics.jsonl")) == without_clock(read(whole / "metrics.jsonl"))
        assert (folder / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    expected = weights(whole, 4)
    assert all((value == expected[name]).all() for name, value in weights(folder, 4).items())


def test_two_ranks_do_what_one_does(four_steps, tmp_path):
    """From the command line. The same responses, verdicts and groups; weights equal up to the order of sums."""
    done = cold(*torchrun(2), "train.py", *TINY, f"--out={tmp_path}", "--steps=2")
    assert done.returncode == 0, done.stderr
    folder, (whole, _) = tmp_path / NAME, four_steps
    assert read(folder / "samples.jsonl") == [line for line in read(whole / "samples.jsonl") if line["step"] <= 2]
    ours, theirs = (without_clock(read(folder / "metrics.jsonl")) for folder in (folder, whole))
    for row, one in zip(ours, theirs[:3], strict=True):
        assert row == pytest.approx(one, rel=1e-4, abs=1e-5)
    one = weights(whole, 2)
    assert all((value - one[name]).abs().max() < 1e-4 for name, value in weights(folder, 2).items())


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["passive", "two_stage"])
def test_the_baselines_do_on_two_ranks_what_they_do_on_one(sampler, tmp_path, toy_folder):
    """Waves and budgets are agreed upon over the real process group."""
    folders = [tmp_path / str(ranks) / f"toy-{sampler}-seed0" for ranks in (1, 2)]
    for ranks, folder in enumerate(folders, 1):
        done = launch(folder.parent, f"--sampler=experiments.baselines:{sampler}", "--steps=2", ranks=ranks)
        assert done.returncode == 0, done.stderr
    assert read(folders[1] / "samples.jsonl") == read(folders[0] / "samples.jsonl")
    ours, theirs = (without_clock(read(folder / "metrics.jsonl")) for folder in reversed(folders))
    for row, expected in zip(ours, theirs, strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_an_exit_rule_and_a_reward_of_ones_own(tmp_path, toy_folder):
    """The way in for whoever has an idea: functions named on the command line."""
    options = ["--sampler=experiments.rules:exit_signal", "--reward=toy:right_chain", "--steps=1", "--eval_data="]
    done = launch(tmp_path, *options)
    assert done.returncode == 0, done.stderr
    [row] = read(tmp_path / "toy-exit_signal-seed0" / "metrics.jsonl")[1:]
    assert row["update/groups"] == 8 - round(8 * row["sampling/uniform_after"])
    assert 8 * 8 <= row["sampling/samples"] < 8 * 32


def test_another_config_is_refused(four_steps):
    """Continuing a run with other options would mix two experiments in one log."""
    folder, _ = four_steps
    before = (folder / "metrics.jsonl").read_bytes(), (folder / "config.json").read_bytes()
    done = launch(folder.parent, "--steps=5", "--lr=1e-3", "--temperature=0.9")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "lr was 0.0005, is 0.001" in done.stderr and "temperature was 1.0, is 0.9" in done.stderr
    assert "steps" not in done.stderr
    assert before == ((folder / "metrics.jsonl").read_bytes(), (folder / "config.json").read_bytes())


def test_sigterm_saves(tmp_path, toy_folder):
    """A preempted job loses at most the step it is in."""
    command, metrics = start(tmp_path, "--steps=500"), tmp_path / NAME / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 4:
        assert command.is_running() and time.monotonic() < deadline
        time.sleep(0.1)
    command.signal(signal.SIGTERM)
    done = command.wait(60)
    last = read(metrics)[-1]["step"]
    assert done.returncode == 0 and f"stopped after step {last}" in done.stdout
    assert max((metrics.parent / "checkpoints").iterdir()).name == f"step-{last:06d}"


# ----------------------------------------------------------------------------------------------------------------
# Bad input: one line that names the option, file and line; exit status 1; nothing left behind


@pytest.fixture
def bad_files(tmp_path):
    (tmp_path / "columns.jsonl").write_text('{"problem": "1+1"}\n')
    (tmp_path / "broken.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n{"problem": \n')
    (tmp_path / "options.yaml").write_text("steps: 3\ncolour: red\n")
    (tmp_path / "list.yaml").write_text("steps: [1, 2]\n")
    (tmp_path / "key.yaml").write_text("seed: 1\n? [steps, seed]\n: 3\n")
    (tmp_path / "value.yaml").write_text("steps: 3\nbaseline: best\n")
    (tmp_path / "limit.yaml").write_text("lr: inf\n")
    (tmp_path / "prose.yaml").write_text("train it well\n")
    (tmp_path / "broken.yaml").write_text("steps: 3\nseed: [\n")
    return tmp_path


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--group_size=33", "--group_size 33: --max_rounds 4 of --round_size 8 give only 32 responses"),
        ("--group_size=1", "--group_size 1: must be at least 2"),
        ("--steps=0", "--steps 0: must be at least 1"),
        ("--clip_low=1.5", "--clip_low 1.5: must be below 1"),
        ("--gpu_memory_share=1", "--gpu_memory_share 1.0: must be below 1"),
        ("--temperature=0", "--temperature 0.0: must be above 0"),
        ("--lr=nan", "--lr nan: must be a finite number"),
        ("--lr=-1e-6", "--lr -1e-06: must be at least 0"),
        ("--importance_cap=inf", "--importance_cap inf: must be a finite number"),
        ("--sampler=best", "--sampler best: must be one of grpo, pos, balance, or MODULE:FUNCTION"),
        ("--baseline=best", "--baseline: invalid choice: 'best'"),
        ("--colour=red", "unknown option --colour"),
        ("--steps=many", "--steps: invalid int value: 'many'"),
        ("--config={folder}/options.yaml", "options.yaml:2: unknown option colour"),
        ("--config={folder}/list.yaml", "list.yaml:1: steps: must be a single value"),
        ("--config={folder}/key.yaml", "key.yaml:2: unknown option "),
        ("--config={folder}/value.yaml", "value.yaml:2: argument --baseline: invalid choice: 'best'"),
        ("--config={folder}/limit.yaml", "--lr inf: must be a finite number"),
        ("--config={folder}/prose.yaml", "prose.yaml: must be lines of the form OPTION: VALUE"),
        ("--config={folder}/broken.yaml", "broken.yaml: while parsing"),
        ("--config={folder}/none.yaml", "none.yaml: No such file"),
    ],
)
def test_impossible_options_are_named(option, message, bad_files):
    with pytest.raises(OptionError) as refused:
        parse_options(train.Config, [option.format(folder=bad_files)])
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--model={folder}/nowhere", "nowhere"),
        ("--train_data={folder}/nowhere.jsonl", "nowhere.jsonl: no such file"),
        ("--train_data={folder}/columns.jsonl", "columns.jsonl: no answer column"),
        ("--train_data={folder}/broken.jsonl", "broken.jsonl:2: bad JSON"),
        ("--max_prompt_tokens=3", "no prompt left (max_prompt_tokens is 3)"),
        ("--max_response_tokens=100000", "max_prompt_tokens + max_response_tokens is 100032"),
        ("--wandb", "wandb is not installed"),
        ("--reward=best", "--reward best: must be math or MODULE:FUNCTION"),
    ],
)
def test_bad_input_is_one_clear_line(option, message, bad_files, toy_folder):
    done = launch(bad_files / "out", option.format(folder=bad_files))
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("[rank 0] error: ") and message in lines[0]
    assert not (bad_files / "out").exists()


def test_bad_input_on_several_ranks(tmp_path, toy_folder):
    """Each says it, none waits for the others."""
    done = launch(tmp_path / "out", "--prompts_per_step=5000", ranks=2)
    assert done.returncode == 1
    message = "error: a batch of 5000 prompts from 1024: ask for fewer a step (--prompts_per_step)"
    assert done.stderr.splitlines() == [f"[rank 0] {message}", f"[rank 1] {message}"]
    assert not (tmp_path / "out").exists()


def test_bad_input_from_the_command_line():
    """No warning of a library stands before the line."""
    done = cold("train.py", "--colour=red")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "[rank 0] error: unknown option --colour=red\n")


# ----------------------------------------------------------------------------------------------------------------
# Options


def test_options_from_yaml_and_command_line(tmp_path):
    """YAML first, command line on top; numbers in any notation; the run's name from both."""
    (tmp_path / "mine.yaml").write_text("lr: 1e-6\nsampler: pos\nnormalize_std: true\nseed: 3  # a remark\n")
    config = parse_options(
        train.Config, [f"--config={tmp_path / 'mine.yaml'}", "--seed", "4", "--keep-checkpoints", "1"]
    )
    assert (config.lr, config.sampler, config.normalize_std, config.seed) == (1e-6, "pos", True, 4)
    assert (config.keep_checkpoints, config.name) == (1, "mine-pos-seed4")


@pytest.mark.parametrize(
    ("options", "remark"),
    [
        ("--sampler=grpo --max_rounds=8", "--round_size, --max_rounds have no effect"),
        ("--model=some/model", "--lr 0.0005 is the toy's order of magnitude"),
    ],
)
def test_what_may_not_be_meant_is_remarked(options, remark):
    """grpo takes more responses by --group_size; and the defaults are the toy's."""
    assert remark in " ".join(parse_options(train.Config, options.split()).remarks())


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A module of the user's in the current folder, which is not the repository's."""
    rule, sampler = "def rule(pool, n): ...\n", "def sampler(engine, scorer, prompts, config, **context): ...\n"
    (tmp_path / "my_rules.py").write_text(rule + sampler)
    (tmp_path / "my_broken.py").write_text("raise RuntimeError('not\\ntoday')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("my_rules", None)


def test_functions_of_ones_own(own_module):
    """--sampler names an exit rule or a whole sampler; a rule has two parameters, and is made a sampler."""
    assert train.find_sampler("my_rules:sampler") is sys.modules["my_rules"].sampler
    rule = train.find_sampler("my_rules:rule")
    assert rule.__qualname__ == train.SAMPLERS["pos"].__qualname__  # what `adaptive` makes
    assert rule.__closure__[0].cell_contents is sys.modules["my_rules"].rule
    assert find_function("--sampler", "ada.sampler:exit_pos", {}) is exit_pos
    assert parse_options(train.Config, ["--sampler=my_rules:rule"]).name == "toy-rule-seed0"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:rule", "ModuleNotFoundError: No module named 'nowhere'"),
        ("my_broken:rule", "RuntimeError: not today"),
        ("ada.sampler:exit_best", "AttributeError: module 'ada.sampler' has no attribute"),
        ("os:environ", "not a function"),
        ("os:", ""),
        ("rule", "must be one of pos, or MODULE:FUNCTION"),
    ],
)
def test_functions_that_are_none_are_named(name, message, own_module):
    with pytest.raises(OptionError) as refused:
        find_function("--sampler", name, {"pos": exit_pos})
    assert str(refused.value).startswith(f"--sampler {name}: {message}") and "\n" not in str(refused.value)


@pytest.mark.parametrize("script", ["train.py", "toy.py", "scripts/prepare.py", "scripts/evaluate.py"])
def test_commands_take_one_thread_unless_told_otherwise(script, tmp_path):
    """torch reads it on import. With an OpenMP thread per core beside a busy grader a command crawls."""
    (tmp_path / "torch.py").write_text("import os\nprint(os.environ['OMP_NUM_THREADS'], flush=True)\nos._exit(0)\n")
    environment = {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": ""}
    unset = "import os, runpy, sys; del os.environ['OMP_NUM_THREADS']; runpy.run_path(sys.argv[1])"
    assert cold("-c", unset, script, environment=environment).stdout == "1\n"
    assert cold(script, environment=environment | {"OMP_NUM_THREADS": "3"}).stdout == "3\n"


@pytest.mark.parametrize("kind", [train.Config, EvalConfig])
def test_no_option_collides_with_torchrun(kind):
    """torchrun reads the whole command line: an option that begins one of its own is "ambiguous" to it."""
    from torch.distributed.run import get_args_parser

    for option in dataclasses.fields(kind):
        arguments = ["script.py", f"--{option.name}", "1"]
        assert get_args_parser().parse_args(arguments).training_script_args == arguments[1:]


# ----------------------------------------------------------------------------------------------------------------
# A run's folder and what it says


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    """make_run(data=.., rank=.., **options): a Run without engine and trainer."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def make(*, data=("1+1",), rank=0, **options) -> Run:
        config = train.Config(out=str(tmp_path), **options)
        prompts = [Prompt(i, text, [], "2") for i, text in enumerate(data)]
        return Run(config, Ranks(rank, 1, None, None), data=prompts)

    return make


def test_changed_data_is_refused(make_run):
    """The same file name with other rows in it would be trained on in the middle of a run."""
    run = make_run()
    assert run.resume(None) == 0
    make_run()
    make_run(steps=200)  # among what may change
    with pytest.raises(UserError, match="was started with other options .data was '.*', is '.*'.: give this run"):
        make_run(data=["1+1", "1+2"])


def test_two_processes_are_not_at_one_run(make_run):
    run = make_run()
    run.resume(None)
    with pytest.raises(UserError, match="another process is at work here"):
        make_run().resume(None)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_gap_above_one_nat_ends_the_run_on_every_rank(rank, make_run):
    """vLLM runs other weights than the trainer's: all that follows would be noise. Below, from 0.05 on, it is said."""
    run = make_run(rank=rank)
    run.path.mkdir()
    run.log({"step": 1, "engine/logprob_gap_mean": 0.9})
    with pytest.raises(RunError, match=r"disagree by 1\.1 nats per token: vLLM does not run the weights") as ended:
        run.log({"step": 2, "engine/logprob_gap_mean": 1.1})
    assert "\n" not in str(ended.value)
    assert len(list(run.path.glob("metrics.jsonl"))) == (rank == 0)


def test_warnings_are_printed_where_a_number_says_that_something_is_wrong(make_run, capsys):
    run = make_run()
    run.path.mkdir()
    run.log({"step": 1, "engine/logprob_gap_mean": 0.01, "response/truncated": 0.1, "engine/logprobs_not_finite": 0})
    assert "warning" not in capsys.readouterr().out
    run.log({"step": 2, "engine/logprob_gap_mean": 0.06, "response/truncated": 0.7, "engine/logprobs_not_finite": 3})
    printed = capsys.readouterr().out
    for words in ("disagree by 0.060 nats", "70% of responses hit max_response_tokens", "3 tokens without a finite"):
        assert f"warning: {words}" in printed or f"warning: engine and trainer {words}" in printed


@pytest.mark.parametrize("largest", [1, 4, 16, 128])
def test_the_step_line_shows_the_largest_pass_at_k(largest, make_run, capsys):
    run = make_run()
    run.path.mkdir()
    shares = {f"eval/pass@{2**i}": 0.5 + i / 100 for i in range(largest.bit_length())}
    run.log({"step": 0, "eval/reward": 0.25, **shares})
    expected = f"held out: reward 0.250  pass@{largest} {shares[f'eval/pass@{largest}']:.3f}"
    assert capsys.readouterr().out == f"step    0  {expected}\n"


def test_a_resumed_run_goes_on_under_its_wandb_id(make_run, monkeypatch):
    """Otherwise each preemption would start another curve. And other runs have other ids."""
    started, logged = [], []
    wandb = SimpleNamespace(
        init=lambda **options: started.append(options),
        log=lambda metrics, step: logged.append(step),
        finish=lambda: logged.append("finish"),
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for name in ("one", "one", "two"):
        run = make_run(name=name, wandb=True)
        run.resume(None)
        run.log({"step": 3})
        run.close()
        run._lock.close()
    ids = [options["id"] for options in started]
    assert ids[0] == ids[1] != ids[2] and {options["resume"] for options in started} == {"allow"}
    assert [options["name"] for options in started] == ["one", "one", "two"]
    assert logged == [3, "finish"] * 3
