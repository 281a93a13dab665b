"""Checkpoints that are either complete or not there.

    out/RUN/checkpoints/step-000040/        state/          model and optimiser, torch.distributed.checkpoint
                                            hf/             the model for transformers and vLLM, safetensors
                                            complete.json   step, schedule; written last

A checkpoint is written under a temporary name, `complete.json` last, then renamed. So a kill at any moment leaves the
older ones untouched and nothing that looks like a newer one. `state/` may be loaded by another number of ranks.
What a kill leaves behind ends in .tmp, is never read, and goes when the next checkpoint is written.
"""

import json
import shutil
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from transformers import GenerationConfig

from ada import UserError, one_line
from ada.support.files import write_atomically
from ada.trainer import Trainer

MARKER = "complete.json"


class CheckpointError(UserError):
    """A checkpoint could not be written or read; older ones are as they were."""


def newest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step, or None."""
    return max(_complete(folder), default=None)


def save(folder: Path, trainer: Trainer, *, step: int, tokenizer, keep: int) -> Path:
    """Write the checkpoint of `step`, then delete all but the newest `keep` (0 keeps all). On every rank.

    Raises:
        CheckpointError: this rank could not write (which ends the job); the half-written folder is removed.
    """
    final = folder / f"step-{step:06d}"
    temporary = final.with_suffix(".tmp")
    ranks = trainer.ranks
    try:
        if ranks.rank == 0:
            for leftover in folder.glob("step-*.tmp"):
                shutil.rmtree(leftover)
            temporary.mkdir(parents=True)
        ranks.barrier()
        model, optimizer = get_state_dict(trainer.lm, trainer.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=temporary / "state")
        export(temporary / "hf", trainer, tokenizer)
        if ranks.rank == 0:
            marker = {"step": step, "schedule": trainer.schedule.state_dict()}
            write_atomically(temporary / MARKER, json.dumps(marker))
            if final.exists():  # incomplete, or this run would have continued from it
                _delete(final)
            temporary.rename(final)
            for old in _complete(folder)[:-keep] if keep else []:
                _delete(old)
    except (Exception, dcp.api.CheckpointException) as error:  # safetensors' and tokenizers' are no OSErrors
        free = shutil.disk_usage(folder.parent).free / 2**30  # torch's own message for a full disk is hard to recognise
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"could not save {final} ({free:.1f} GiB free there): {_reason(error)}") from error
    ranks.barrier()
    return final


def load(path: Path, trainer: Trainer) -> int:
    """Put weights, optimiser and schedule of a checkpoint into the trainer; returns its step. On every rank.

    Raises:
        CheckpointError: anything is missing or does not fit the model.
    """
    try:
        marker = json.loads((path / MARKER).read_text())
        model, optimizer = get_state_dict(trainer.lm, trainer.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=path / "state")
        set_state_dict(
            trainer.lm, trainer.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        trainer.schedule.load_state_dict(marker["schedule"])
        return marker["step"]
    except (OSError, KeyError, ValueError, dcp.api.CheckpointException) as error:
        raise CheckpointError(f"could not load {path}: {_reason(error)}") from error


def export(folder: Path, trainer: Trainer, tokenizer) -> None:
    """Write model, generation config and tokenizer as a Hugging Face folder, in the dtype the engine runs in.

    On every rank; the whole model comes together on rank 0 alone, in host memory.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(trainer.lm, options=options)
    if trainer.ranks.rank == 0:
        own = dict(trainer.lm.named_parameters())  # a tied head is not among them, transformers ties it again
        tied = dict(trainer.lm.named_parameters(remove_duplicate=False)).keys() - own.keys()
        dtype = trainer.ranks.compute_dtype
        weights = {name: weight.to(dtype) for name, weight in weights.items() if name not in tied}
        # A generation config that transformers loads may not pass its checks for saving: it is carried over as it is.
        generation_config, trainer.lm.generation_config = trainer.lm.generation_config, GenerationConfig()
        trainer.lm.save_pretrained(folder, state_dict=weights)
        trainer.lm.generation_config = generation_config
        (folder / "generation_config.json").write_text(generation_config.to_json_string())
        trainer.lm.config.dtype = dtype  # save_pretrained wrote that of the fp32 master weights
        trainer.lm.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _complete(folder: Path) -> list[Path]:
    """The complete ones, in order of their steps: names have six digits."""
    return sorted(marker.parent for marker in folder.glob(f"step-*[0-9]/{MARKER}"))


def _delete(path: Path) -> None:
    """Renamed first: a kill must not leave half a checkpoint with its marker."""
    shutil.rmtree(path.rename(path.with_suffix(".old.tmp")))


def _reason(error: BaseException) -> str:
    """Kind and message, on one line; of a failure on several ranks, those of the first."""
    if isinstance(error, dcp.api.CheckpointException):
        rank, (error, _) = min(error.failures.items())
        return f"rank {rank}: {_reason(error)}"
    return f"{type(error).__name__}: {one_line(error)}"
