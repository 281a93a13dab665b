"""train.py with 5% of the engine's responses replaced by answers that a grader may hang on."""

import ada.engine
import train
from ada.sampler import seed_of
from bench.reward import HOSTILE

original = ada.engine.Engine.poll


def poll(self):
    samples = original(self)
    for sample in samples:
        key = (sample.prompt_id, sample.index)
        if seed_of(key, sample.tokens) % 20 == 0:
            sample.text = rf"\boxed{{{[*HOSTILE, chr(0) + chr(0xD800)][seed_of(key) % (len(HOSTILE) + 1)]}}}"
    return samples


ada.engine.Engine.poll = poll
train.main()
