"""train.py that keeps a file, $PHASE_FILE, saying what rank 0 is doing, for whoever wants to kill it at that moment."""

import os
from pathlib import Path

import ada.engine
import ada.sampler
import ada.support.checkpoint
import train

file = Path(os.environ["PHASE_FILE"])


def watch(owner, name: str, phase: str) -> None:
    original = getattr(owner, name)

    def watched(*args, **kwargs):
        if os.environ.get("RANK", "0") == "0":
            file.write_text(phase)
        result = original(*args, **kwargs)
        if os.environ.get("RANK", "0") == "0":
            file.write_text("between")
        return result

    setattr(owner, name, watched)


watch(ada.sampler, "sample_adaptively", "sampling")
watch(train.Trainer, "update", "update")
watch(ada.engine.Engine, "sync", "sync")
watch(ada.support.checkpoint, "save", "saving")
train.main()
