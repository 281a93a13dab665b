"""Checkpoints: bit for bit, across numbers of ranks, complete or not there, and what Hugging Face reads of them."""

import json
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny import (
    distance,
    equal,
    make_groups,
    make_trainer,
    optimizer_state_of,
    run_on_ranks,
    weights_of,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ada.support import checkpoint
from ada.support.checkpoint import MARKER, CheckpointError
from ada.support.files import FileError, cut_log
from ada.support.ranks import Ranks
from ada.trainer import collate, sequences_of
from toy import make_tokenizer

EXACT = 1e-5  # relative, fp32
GROUPS = make_groups(4)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def trained(folder: str, ranks: Ranks, n_steps: int = 2, **options):
    trainer = fresh(folder, ranks, **options)
    for step in range(1, n_steps + 1):
        trainer.update(GROUPS, step=step)
    return trainer


def fresh(folder: str, ranks: Ranks, **options):
    return make_trainer(folder, ranks, lr=1e-3, updates_per_step=2, **options)


def everything_of(trainer) -> dict[str, torch.Tensor]:
    """Weights, optimiser state and schedule, whole. Collective."""
    schedule = {"lr": trainer.schedule.get_last_lr()[0], "iteration": trainer.schedule.last_epoch}
    return {
        **weights_of(trainer),
        **optimizer_state_of(trainer),
        **{f"schedule.{name}": torch.tensor(value, dtype=torch.float64) for name, value in schedule.items()},
        "optimizer.lr": torch.tensor(trainer.optimizer.param_groups[0]["lr"], dtype=torch.float64),
    }


def fake_checkpoint(folder: Path, name: str, *, complete: bool = True) -> Path:
    (folder / name / "state").mkdir(parents=True)
    if complete:
        (folder / name / MARKER).write_text(json.dumps({"step": 0, "schedule": {}}))
    return folder / name


# ----------------------------------------------------------------------------------------------------------------
# There and back


def test_a_loaded_trainer_is_the_saved_one_bit_for_bit_and_goes_on_alike(ranks, model, tokenizer, tmp_path):
    saved = trained(model, ranks)
    before = everything_of(saved)
    path = checkpoint.save(tmp_path, saved, step=2, tokenizer=tokenizer, keep=2)
    assert path == checkpoint.newest(tmp_path) == tmp_path / "step-000002"
    assert equal(everything_of(saved), before), "saving changed something"

    loaded = trained(model, ranks, n_steps=4)  # what it has learnt is overwritten
    assert checkpoint.load(path, loaded) == 2
    assert equal(everything_of(loaded), before)
    metrics = [trainer.update(GROUPS, step=3) for trainer in (saved, loaded)]
    assert metrics[0] == metrics[1]
    assert equal(everything_of(loaded), everything_of(saved))


def test_saving_before_the_first_update_changes_nothing(ranks, model, tokenizer, tmp_path):
    """All prompts of the first steps can be uniform: no update, no optimiser state yet."""
    saved, loaded, never_saved = (make_trainer(model, ranks, weight_decay=0.1) for _ in range(3))
    checkpoint.load(checkpoint.save(tmp_path, saved, step=1, tokenizer=tokenizer, keep=2), loaded)
    for trainer in (saved, loaded, never_saved):
        trainer.update(GROUPS, step=2)
    assert equal(everything_of(saved), everything_of(never_saved))
    assert equal(everything_of(loaded), everything_of(never_saved))


def continue_from(ranks: Ranks, model: str, saved_by_one: Path, folder: Path) -> dict[str, dict]:
    """On several ranks: load what one rank saved, save that, and take another step."""
    trainer = fresh(model, ranks)
    checkpoint.load(saved_by_one, trainer)
    loaded = everything_of(trainer)
    path = checkpoint.save(folder, trainer, step=2, tokenizer=make_tokenizer(), keep=2)
    trainer.update(GROUPS, step=3)
    return {"loaded": loaded, "path": path, "continued": everything_of(trainer)}


def test_another_number_of_ranks_continues_from_a_checkpoint(ranks, model, tokenizer, tmp_path):
    trainer = trained(model, ranks)
    before = everything_of(trainer)
    path = checkpoint.save(tmp_path / "one", trainer, step=2, tokenizer=tokenizer, keep=2)
    outcomes = run_on_ranks(continue_from, 2, tmp_path / "meet", model, path, tmp_path / "two")

    back = fresh(model, ranks)
    assert checkpoint.load(outcomes[0]["path"], back) == 2
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["step-000002"]
    assert equal(everything_of(back), before)
    trainer.update(GROUPS, step=3)
    back.update(GROUPS, step=3)
    assert equal(everything_of(back), everything_of(trainer))
    for outcome in outcomes:
        assert equal(outcome["loaded"], before)
        assert distance(outcome["continued"], everything_of(trainer)) < EXACT


# ----------------------------------------------------------------------------------------------------------------
# Complete or not there


def test_newest_is_the_complete_one_of_the_highest_step(tmp_path):
    assert checkpoint.newest(tmp_path / "nowhere") is None
    assert checkpoint.newest(tmp_path) is None
    fake_checkpoint(tmp_path, "step-000900")
    expected = fake_checkpoint(tmp_path, "step-001000")
    fake_checkpoint(tmp_path, "step-002000", complete=False)
    fake_checkpoint(tmp_path, "step-002001.tmp")
    fake_checkpoint(tmp_path, "step-002002.old.tmp")
    fake_checkpoint(tmp_path, "step-backup")
    assert checkpoint.newest(tmp_path) == expected


def test_saving_keeps_the_newest_complete_ones(ranks, model, tokenizer, tmp_path):
    for name in ("step-000010", "step-000020", "step-000030"):
        fake_checkpoint(tmp_path, name)
    fake_checkpoint(tmp_path, "step-000005", complete=False)
    fake_checkpoint(tmp_path, "step-000040.tmp")  # killed just before the rename
    fake_checkpoint(tmp_path, "step-000035", complete=False)
    (tmp_path / "notes.txt").write_text("the user's own")
    trainer = make_trainer(model, ranks)

    def names_after(step: int, keep: int) -> list[str]:
        checkpoint.save(tmp_path, trainer, step=step, tokenizer=tokenizer, keep=keep)
        return sorted(path.name for path in tmp_path.iterdir())

    incomplete = ["step-000005", "step-000035"]
    assert names_after(31, keep=3) == sorted(["notes.txt", "step-000020", "step-000030", "step-000031", *incomplete])
    assert names_after(32, keep=0) == sorted(
        ["notes.txt", "step-000020", "step-000030", "step-000031", "step-000032", *incomplete]
    )
    assert names_after(35, keep=1) == ["notes.txt", "step-000005", "step-000035"]
    assert checkpoint.load(tmp_path / "step-000035", trainer) == 35  # in the place of the incomplete one


@pytest.mark.parametrize("name", [MARKER, "state/.metadata", "state/__0_0.distcp"])
def test_a_damaged_checkpoint_is_an_error_of_one_line(ranks, model, saved_once, tmp_path, name):
    path = shutil.copytree(saved_once, tmp_path / "step-000002")
    content, trainer = (path / name).read_bytes(), make_trainer(model, ranks)
    for damaged in (content[: len(content) // 2], b"", None):
        (path / name).unlink() if damaged is None else (path / name).write_bytes(damaged)
        with pytest.raises(CheckpointError, match="could not load .*step-000002: ") as raised:
            checkpoint.load(path, trainer)
        assert "\n" not in str(raised.value)


def test_another_models_checkpoint_is_an_error(ranks, llama, saved_once):
    with pytest.raises(CheckpointError, match="lm_head.weight"):
        checkpoint.load(saved_once, make_trainer(llama, ranks))


@pytest.fixture(scope="module")
def saved_once(ranks, model, tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    return checkpoint.save(folder, trained(model, ranks), step=2, tokenizer=tokenizer, keep=2)


class Killed(BaseException):
    """Nothing catches it, so what was on the disk at that moment stays there."""


@pytest.mark.parametrize(
    ("where", "survivor"),
    [
        ("dcp.save", 2),
        ("export", 2),
        ("write_atomically", 2),
        ("Path.rename", 2),  # complete, but under its temporary name
        ("shutil.rmtree", 3),  # in place, the older one half deleted
    ],
)
def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(
    ranks, model, tokenizer, saved_once, tmp_path, monkeypatch, where, survivor
):
    shutil.copytree(saved_once, tmp_path / "step-000002")
    trainer = trained(model, ranks)
    name = where.rpartition(".")[2]
    owner = {"dcp.save": checkpoint.dcp, "Path.rename": Path, "shutil.rmtree": shutil}.get(where, checkpoint)
    original = getattr(owner, name)

    def killed(*arguments, **options):
        if where == "Path.rename" and arguments[0].name != "step-000003.tmp":  # torch renames, too
            return original(*arguments, **options)
        if where == "shutil.rmtree":
            (arguments[0] / "state" / ".metadata").unlink()
        elif where in ("dcp.save", "write_atomically"):
            original(*arguments, **options)
        raise Killed

    monkeypatch.setattr(owner, name, killed)
    with pytest.raises(Killed):
        checkpoint.save(tmp_path, trainer, step=3, tokenizer=tokenizer, keep=1)
    monkeypatch.undo()
    assert checkpoint.load(checkpoint.newest(tmp_path), make_trainer(model, ranks)) == survivor

    checkpoint.save(tmp_path, trainer, step=4, tokenizer=tokenizer, keep=1)  # and the next one cleans up
    assert [path.name for path in tmp_path.iterdir()] == ["step-000004"]


@contextmanager
def disk_full_after(n_bytes: int):
    """No file can grow beyond `n_bytes`. To the writer it is a full disk with another error number."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("stage", ["state", "model", "tokenizer", "marker"])
def test_a_full_disk_is_one_line_and_leaves_older_checkpoints(
    ranks, model, tokenizer, saved_once, tmp_path, monkeypatch, stage
):
    shutil.copytree(saved_once, tmp_path / "step-000002")
    trainer = trained(model, ranks)
    if stage in ("model", "tokenizer"):  # what comes earlier in the same way fits
        monkeypatch.setattr(checkpoint.dcp, "save", lambda *_, **__: None)
    if stage == "tokenizer":
        monkeypatch.setattr(trainer.lm, "save_pretrained", lambda *_, **__: None)
    if stage == "marker":
        monkeypatch.setattr(checkpoint, "write_atomically", _no_space)
    limit = {"state": 100_000, "model": 20_000, "tokenizer": 2_000, "marker": resource.RLIM_INFINITY}[stage]
    with (
        disk_full_after(limit),
        pytest.raises(CheckpointError, match=r"could not save .*step-000003 \(.* GiB free there\): ") as raised,
    ):
        checkpoint.save(tmp_path, trainer, step=3, tokenizer=tokenizer, keep=1)
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]
    assert checkpoint.load(checkpoint.newest(tmp_path), trainer) == 2
    monkeypatch.undo()
    checkpoint.save(tmp_path, trainer, step=3, tokenizer=tokenizer, keep=1)  # there is space again


def _no_space(path, text):
    raise OSError(28, "No space left on device", str(path))


def test_a_folder_that_cannot_be_made_is_one_line(ranks, model, tokenizer, tmp_path):
    """Where a file stands in the way: root may write to any folder, so its mode would prove nothing."""
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(
        CheckpointError, match="could not save .*checkpoints/step-000001.*(Not a directory|File exists)"
    ):
        checkpoint.save(tmp_path / "checkpoints", make_trainer(model, ranks), step=1, tokenizer=tokenizer, keep=2)


def save_where_nobody_can(ranks: Ranks, model: str, folder: Path) -> str:
    """The error that this rank sees when rank 1 alone cannot write its share."""
    trainer = make_trainer(model, ranks)
    with disk_full_after(1000 if ranks.rank == 1 else resource.RLIM_INFINITY):
        try:
            checkpoint.save(folder, trainer, step=1, tokenizer=make_tokenizer(), keep=2)
        except CheckpointError as error:
            return str(error)
    return ""


def test_all_ranks_hear_of_one_that_could_not_write(model, tmp_path):
    errors = run_on_ranks(save_where_nobody_can, 2, tmp_path / "meet", model, tmp_path / "checkpoints")
    assert all("rank 1: " in error for error in errors), errors
    assert list((tmp_path / "checkpoints").iterdir()) == []


# ----------------------------------------------------------------------------------------------------------------
# Logs


@pytest.mark.parametrize(
    ("text", "step", "n_kept"),
    [
        ("", 5, 0),
        ('{"step": 0}\n{"step": 1}\n', 1, 2),
        ('{"step": 0}\n{"step": 1}\n{"step": 2}\n', 1, 2),
        ('{"step": 1, "a": 1}\n{"step": 1, "a": 2}\n{"step": 2}\n', 1, 2),
        ('{"step": 0}\n{"step": 1, "rew', 1, 1),  # killed while writing
        ('{"step": 0}\n{"step": 1}', 1, 1),  # complete but for the end of the line: written again
        ('{"step": 0}\n{"step": 1}\n', -1, 0),
    ],
)
def test_a_log_is_cut_back_to_the_checkpoint(tmp_path, text, step, n_kept):
    log = tmp_path / "metrics.jsonl"
    cut_log(log, step)  # there need not be one
    assert list(tmp_path.iterdir()) == []
    log.write_text(text)
    cut_log(log, step)
    assert log.read_text() == "".join(text.splitlines(keepends=True)[:n_kept])
    assert list(tmp_path.iterdir()) == [log]


def test_a_log_that_cannot_be_cut_stays_as_it_was(tmp_path):
    log = tmp_path / "metrics.jsonl"
    text = "".join(json.dumps({"step": step}) + "\n" for step in range(100))
    for broken in (text, "no JSON\n" + text):
        log.write_text(broken)
        with disk_full_after(200), pytest.raises(FileError, match="could not cut .*metrics.jsonl back to step 50: "):
            cut_log(log, 50)
        assert log.read_text() == broken


# ----------------------------------------------------------------------------------------------------------------
# Hugging Face


@pytest.mark.parametrize("family", ["model", "llama"])
def test_the_export_is_what_transformers_loads(request, ranks, tokenizer, tmp_path, family):
    folder = request.getfixturevalue(family)
    trainer = trained(folder, ranks)
    hf = checkpoint.save(tmp_path, trainer, step=2, tokenizer=tokenizer, keep=2) / "hf"

    loaded = AutoModelForCausalLM.from_pretrained(hf, dtype="auto")
    original = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert type(loaded) is type(original)
    assert equal(dict(loaded.named_parameters()), weights_of(trainer))
    batch = collate(sequences_of(GROUPS), ranks.device)
    with torch.no_grad():
        expected, _ = trainer.policy(batch.tokens_BT, batch.is_response_BT)
        logps = loaded(batch.tokens_BT[:, :-1]).logits.log_softmax(-1)
    logps = logps.gather(-1, batch.tokens_BT[:, 1:, None])[..., 0][batch.is_response_BT[:, 1:]]
    torch.testing.assert_close(logps, expected, rtol=EXACT, atol=1e-5)

    assert sorted(path.suffix for path in hf.iterdir() if path.suffix not in (".json", ".jinja")) == [".safetensors"]
    with safe_open(hf / "model.safetensors", "pt") as file:
        names = set(file.keys())
    with safe_open(Path(folder) / "model.safetensors", "pt") as file:
        assert names == set(file.keys())
    assert ("lm_head.weight" in names) == (family == "llama")

    text = "1+2<eos>"
    assert AutoTokenizer.from_pretrained(hf)(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert AutoTokenizer.from_pretrained(hf).chat_template == tokenizer.chat_template
    assert GenerationConfig.from_pretrained(hf).eos_token_id == original.generation_config.eos_token_id == 2


def test_a_generation_config_that_cannot_be_saved_is_carried_over(ranks, model, tokenizer, tmp_path):
    """Some public models have one: transformers reads a temperature without do_sample, and refuses to write it."""
    folder = shutil.copytree(model, tmp_path / "model")
    written = {"eos_token_id": [2, 3], "temperature": 0.6, "top_p": 0.95, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(written))
    trainer = make_trainer(str(folder), ranks)
    with pytest.raises(ValueError, match="do_sample"):
        trainer.lm.generation_config.save_pretrained(tmp_path)
    checkpoint.export(tmp_path / "hf", trainer, tokenizer)
    exported = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert {name: exported.get(name, False) for name in written} == written
    assert trainer.lm.generation_config.temperature == 0.6, "the trainer's own must stay what it was"
    assert GenerationConfig.from_pretrained(tmp_path / "hf").eos_token_id == [2, 3]


def test_the_export_is_in_the_engines_dtype_and_says_so(ranks, model, tokenizer, tmp_path):
    class Bf16Ranks(Ranks):  # as on a GPU
        compute_dtype = torch.bfloat16

    trainer = make_trainer(model, Bf16Ranks(**vars(ranks)))
    checkpoint.export(tmp_path / "hf", trainer, tokenizer)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert {weight.dtype for weight in loaded.parameters()} == {torch.bfloat16}
    assert equal(dict(loaded.state_dict()), dict(trainer.named_weights()))
    assert {weight.dtype for weight in trainer.lm.parameters()} == {torch.float32}
