"""Exit rules that try to spend less than balance: docs/claims.md has what came of them.

    torchrun train.py --sampler experiments.rules:exit_signal

Balance draws until it has two of each kind. On the toy's base model that resolves few prompts that one of each kind
would not, and most of its budget goes to prompts whose pools have zero variance to the last round.
"""

from ada.sampler import Pool


def exit_signal(pool: Pool, n: int) -> bool:
    """Stop as soon as the pool can teach anything at all: one correct response and one incorrect one.

    pos forgets the incorrect one, and so gets nothing from prompts that are nearly always solved.
    """
    return not pool.zero_variance


class ExitMemory:
    """`exit_signal` that remembers which prompts took all rounds for nothing, and gives those one round next time.

    So each prompt that was never solved, or always, gets a look once an epoch, and its full budget again as soon
    as that look shows something else. The memory is this process's: one rank, and a resumed run has forgotten.
    """

    def __init__(self):
        self.in_vain: dict[int, bool] = {}  # prompt_id -> the verdict of all its responses

    def __call__(self, pool: Pool, n: int) -> bool:
        prompt = pool.prompt.prompt_id
        if not pool.zero_variance:
            self.in_vain.pop(prompt, None)
            return True
        verdict = pool.samples[0].correct
        if pool.rounds == 1:
            return self.in_vain.get(prompt) == verdict
        self.in_vain[prompt] = verdict  # so far; forgotten as soon as the pool is mixed
        return False


exit_memory = ExitMemory()
