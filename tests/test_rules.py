"""The experimental exit rules."""

from test_sampler import coin, make_prompts, pool_of, sample

from experiments.rules import ExitMemory, exit_signal


def test_signal_is_one_of_each_kind():
    for right in range(9):
        for wrong in range(9 - right):
            if right + wrong:
                assert exit_signal(pool_of("1" * right + "0" * wrong), 4) == (right > 0 and wrong > 0)


def test_signal_never_has_fewer_mixed_pools_than_balance_and_costs_less():
    """Both go on until the last round while a pool has zero variance, on the same responses."""
    prompts = make_prompts(400)
    balance, signal = sample(prompts, coin(0.1)), sample(prompts, coin(0.1), exit_rule=exit_signal)
    assert sum(not p.zero_variance for p in balance) == sum(not p.zero_variance for p in signal)
    assert sum(len(p.samples) for p in signal) < 0.8 * sum(len(p.samples) for p in balance)


def test_memory_gives_one_round_to_what_was_in_vain():
    memory, prompts = ExitMemory(), make_prompts(3)

    def rounds(p, step):
        return [pool.rounds for pool in sample(prompts, coin(p), exit_rule=memory, step=step)]

    assert rounds(0, step=1) == [4, 4, 4]
    assert rounds(0, step=2) == rounds(0, step=3) == [1, 1, 1]
    assert rounds(1, step=4) == [4, 4, 4], "always right is news to a prompt that was always wrong"
    assert rounds(1, step=5) == [1, 1, 1]
    rounds(0.5, step=6)  # mixed: forgotten
    assert rounds(1, step=7) == [4, 4, 4]
