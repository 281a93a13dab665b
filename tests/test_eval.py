"""Ave@k and Pass@k against brute force, and what an evaluation draws."""

import math
from itertools import combinations, islice
from types import SimpleNamespace

import pytest
from test_sampler import FakeEngine, FakeScorer, FakeStore, assert_mean, coin, make_prompts, pool_of

from ada.data import shared_queue
from ada.eval import draw, evaluate, pass_at_k, summarise_eval
from ada.sampler import seed_of


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
    """The easy mistakes, 1 - (1 - c/n)^k among them, are biased, by most where few are right."""
    for n in range(1, 9):
        for n_correct in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations([True] * n_correct + [False] * (n - n_correct), k))
                share = sum(map(any, subsets)) / len(subsets)
                assert pass_at_k(n, n_correct, k) == pytest.approx(share), (n, n_correct, k)


@pytest.mark.parametrize("k", [1, 2, 7, 64, 256])
@pytest.mark.parametrize("p", [0.003, 0.1, 0.6])
def test_pass_at_k_is_unbiased(p, k):
    """Averaged over what 256 samples may bring it must be 1 - (1-p)^k; and large numbers mustn't overflow."""
    n = 256
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    expected = sum(chance * pass_at_k(n, c, k) for c, chance in enumerate(chances))
    assert expected == pytest.approx(1 - (1 - p) ** k)


def test_pass_at_k_at_its_ends():
    """None right is never a pass, all right always; pass@1 is the mean."""
    assert [pass_at_k(n=1000, n_correct=c, k=500) for c in (0, 501, 1000)] == [0, 1, 1]
    assert pass_at_k(n=16, n_correct=3, k=1) == pytest.approx(3 / 16)


def test_pass_at_k_needs_k_samples():
    """With fewer there is no unbiased estimate; any number returned would be made up."""
    with pytest.raises(ValueError, match="pass@5 needs at least 5 samples per prompt, there are 4"):
        pass_at_k(n=4, n_correct=1, k=5)


POOLS = [pool_of("1000", row=0), pool_of("0000", row=1), pool_of("1111", row=2)]


def test_summarise_eval_by_hand():
    """The reported numbers; keys are relied upon by plots and scripts."""
    assert summarise_eval(POOLS, k=4) == pytest.approx(
        {
            "eval/reward": (1 / 4 + 0 + 1) / 3,
            "eval/pass@1": (1 / 4 + 0 + 1) / 3,
            "eval/pass@2": (1 / 2 + 0 + 1) / 3,  # 3 of the 6 pairs of the first prompt have its right response
            "eval/pass@4": 2 / 3,
            "eval/entropy": 0.1,  # each token has log-prob -0.1
            "eval/length": 2.5,  # 1, 2, 3 and 4 tokens
            "eval/truncated": 1 / 4,
        }
    )


def test_entropy_is_a_mean_over_tokens():
    """Averaged per response first, short responses would count for more."""
    pool = pool_of("10")  # of 1 and 2 tokens
    pool.samples[0].logprobs = [-3.0]
    assert summarise_eval([pool], k=2)["eval/entropy"] == pytest.approx((3.0 + 0.1 + 0.1) / 3)


def test_pools_without_tokens_give_the_same_summary():
    """They are what ranks send each other."""
    assert summarise_eval([pool.without_tokens() for pool in POOLS], 4) == pytest.approx(summarise_eval(POOLS, 4))


def test_pass_at_16_has_its_key():
    """Scripts rely on eval/pass@16; the ladder has to end at k, not before."""
    summary = summarise_eval([pool_of("1" + "0" * 15)], k=16)
    assert [key for key in summary if "pass" in key] == [f"eval/pass@{k}" for k in (1, 2, 4, 8, 16)]
    assert summary["eval/pass@16"] == 1


def test_draw_takes_k_of_each_prompt_from_seeds_of_its_own():
    """Drawn from the training seeds, evaluation would see the training's luck; drawn in rounds, some prompts more."""
    engine = FakeEngine(coin(0.3))
    pools = draw(engine, FakeScorer(), make_prompts(6), k=16, seed=3, step=20)
    assert [(pool.prompt.row, len(pool.samples), pool.rounds) for pool in pools] == [(row, 16, 1) for row in range(6)]
    assert all(seed == seed_of("eval", 3, 20, row, index) for (row, index), _, seed in engine.requests)


@pytest.mark.parametrize("p", [0.05, 0.4])
def test_a_simulated_evaluation_finds_the_true_pass_rates(p):
    """The whole path on prompts of known difficulty: what it reports are estimates of p and 1 - (1-p)^k."""
    pools = draw(FakeEngine(coin(p)), FakeScorer(), make_prompts(1000), k=16, seed=0, step=0)
    summary = summarise_eval(pools, k=16)
    assert_mean([pool.mean for pool in pools], p)
    for k in (1, 2, 4, 8, 16):
        estimates = [pass_at_k(16, pool.n_correct, k) for pool in pools]
        assert summary[f"eval/pass@{k}"] == pytest.approx(sum(estimates) / 1000)
        assert_mean(estimates, 1 - (1 - p) ** k)


def test_ranks_evaluate_each_prompt_once_and_report_all_of_them():
    """A rank that reports its own share, or prompts drawn by both, would give other numbers than one rank does."""
    prompts, store, options = make_prompts(20), FakeStore(), {"k": 4, "seed": 0, "step": 5}
    alone = summarise_eval(draw(FakeEngine(coin(0.3)), FakeScorer(), prompts, **options), k=4)

    first_seven = islice(shared_queue(prompts, store, "eval/5"), 7)
    theirs = draw(FakeEngine(coin(0.3)), FakeScorer(), first_seven, **options)
    ranks = SimpleNamespace(store=store, gather=lambda mine, key: sorted(theirs + mine, key=key))
    metrics = evaluate(FakeEngine(coin(0.3)), FakeScorer(), prompts, ranks, **options)

    assert metrics.pop("time/eval") >= 0
    assert metrics == alone


def test_without_held_out_prompts_there_is_nothing_to_report():
    """--eval_data "" turns evaluation off; a division by no prompts would end the run."""
    assert evaluate(None, None, [], None, k=4, seed=0, step=0) == {}
