"""Ave@k and Pass@k against brute force, and what an evaluation in training draws, reports and counts."""

import math
from collections import Counter
from itertools import combinations

import pytest
from test_sampler import FakeEngine, FakeScorer, FakeStore, coin, fake_ranks, make_prompts, pool_of, sample

from ada.eval import all_right_at_k, evaluate, pass_at_k, summarise_eval
from ada.sampler import exit_fixed, seed_of
from ada.support.metrics import grading_failures, without_tokens
from ada.support.ranks import Ranks

NO_FAILURES = {f"eval/grading/{cause}": 0 for cause in ("timeout", "memory", "crash", "too_long")}


def test_the_estimators_are_shares_of_subsets():
    """The easy mistakes, 1 - (1 - c/n)^k among them, are biased, by most where few are right. And Fig. 2's curves."""
    for n in range(1, 9):
        for n_correct in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations([True] * n_correct + [False] * (n - n_correct), k))
                one_right, all_right = sum(map(any, subsets)) / len(subsets), sum(map(all, subsets)) / len(subsets)
                assert pass_at_k(n, n_correct, k) == pytest.approx(one_right), (n, n_correct, k)
                assert all_right_at_k(n, n_correct, k) == pytest.approx(all_right), (n, n_correct, k)


@pytest.mark.parametrize("k", [1, 2, 7, 64, 256])
@pytest.mark.parametrize("p", [0.003, 0.1, 0.6])
def test_pass_at_k_is_unbiased(p, k):
    """Averaged over what 256 samples may bring it must be 1 - (1-p)^k; and large numbers mustn't overflow."""
    n = 256
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    expected = sum(chance * pass_at_k(n, c, k) for c, chance in enumerate(chances))
    assert expected == pytest.approx(1 - (1 - p) ** k)


def test_pass_at_k_at_its_ends():
    """None right is never a pass, all right always; pass@1 is the mean; k above n would be made up."""
    assert [pass_at_k(n=1000, n_correct=c, k=500) for c in (0, 501, 1000)] == [0, 1, 1]
    assert pass_at_k(n=16, n_correct=3, k=1) == pytest.approx(3 / 16)
    for estimate in (pass_at_k, all_right_at_k):
        with pytest.raises(ValueError, match="pass@5 needs at least 5 samples per prompt, there are 4"):
            estimate(n=4, n_correct=1, k=5)


POOLS = [pool_of("1000", prompt_id=0), pool_of("0000", prompt_id=1), pool_of("1111", prompt_id=2)]


def test_summarise_eval_by_hand():
    """The reported numbers; keys are relied upon by plots and scripts. Pools without tokens are what ranks send."""
    expected = {
        "eval/reward": (1 / 4 + 0 + 1) / 3,
        "eval/pass@1": (1 / 4 + 0 + 1) / 3,
        "eval/pass@2": (1 / 2 + 0 + 1) / 3,  # 3 of the 6 pairs of the first prompt have its right response
        "eval/pass@4": 2 / 3,
        "eval/all_right@1": (1 / 4 + 0 + 1) / 3,
        "eval/all_right@2": 1 / 3,
        "eval/all_right@4": 1 / 3,
        "eval/entropy": 0.1,  # each token has log-prob -0.1
        "eval/length": 2.5,  # 1, 2, 3 and 4 tokens
        "eval/truncated": 1 / 4,
    }
    assert summarise_eval(POOLS, k=4) == pytest.approx(expected)
    assert summarise_eval([without_tokens(pool) for pool in POOLS], k=4) == pytest.approx(expected)


def test_entropy_is_a_mean_over_tokens():
    """Averaged per response first, short responses would count for more."""
    pool = pool_of("10")  # of 1 and 2 tokens
    pool.samples[0].logprob_sum = -3.0
    assert summarise_eval([pool], k=2)["eval/entropy"] == pytest.approx((3.0 + 0.1 + 0.1) / 3)


@pytest.mark.parametrize(("k", "ladder"), [(16, [1, 2, 4, 8, 16]), (1, [1]), (6, [1, 2, 4])])
def test_the_ladder_ends_at_k(k, ladder):
    """Scripts rely on eval/pass@16."""
    summary = summarise_eval([pool_of("1" + "0" * (k - 1))], k=k)
    assert [key for key in summary if "pass" in key] == [f"eval/pass@{i}" for i in ladder]


def test_an_evaluation_takes_k_of_each_prompt_from_seeds_of_its_own():
    """Drawn from the training seeds, it would see the training's luck; drawn in rounds, some prompts more."""
    engine = FakeEngine(coin(0.3))
    evaluate(engine, FakeScorer(), make_prompts(6), fake_ranks(), k=16, seed=3, step=20)
    assert Counter(prompt_id for (prompt_id, _), *_ in engine.requests) == dict.fromkeys(range(6), 16)
    assert all(seed == seed_of("eval", 3, 20, *key) for key, _, seed in engine.requests)


@pytest.mark.parametrize("p", [0.05, 0.4])
def test_a_simulated_evaluation_finds_the_true_pass_rates(p):
    """The whole path on prompts of known difficulty: what it reports are estimates of p and 1 - (1-p)^k."""
    metrics = evaluate(FakeEngine(coin(p)), FakeScorer(), make_prompts(1000), fake_ranks(), k=16, seed=0, step=0)
    assert metrics["eval/reward"] == pytest.approx(metrics["eval/pass@1"])
    for k in (1, 2, 4, 8, 16):
        chance = 1 - (1 - p) ** k
        error = math.sqrt(chance * (1 - chance) * k / 16 / 1000)  # at most: 16 / k groups of k in each prompt's 16
        assert abs(metrics[f"eval/pass@{k}"] - chance) < 4 * error


def test_ranks_evaluate_each_prompt_once_and_report_all_of_them():
    """A rank that reports its own share, or prompts drawn by both, would give other numbers than one rank does."""
    prompts, store, options = make_prompts(20), FakeStore(), {"k": 4, "seed": 0, "step": 5}
    alone = evaluate(FakeEngine(coin(0.3)), FakeScorer(), prompts, fake_ranks(), **options)

    of_the_other = fake_ranks(store).share(prompts, "eval/5")
    first_seven = [next(of_the_other) for _ in range(7)]
    how = dict(exit_rule=exit_fixed, group_size=4, round_size=4, step=5, purpose="eval")
    theirs = [without_tokens(pool) for pool in sample(first_seven, coin(0.3), **how)]

    class BesideAnother(Ranks):
        def gather(self, items, key=None):
            return sorted(items + theirs, key=key) if key else items

    together = evaluate(FakeEngine(coin(0.3)), FakeScorer(), prompts, BesideAnother(1, 2, None, store), **options)
    assert alone.pop("time/eval") >= 0 <= together.pop("time/eval")
    assert together == alone


def test_grading_failures_of_an_evaluation_are_booked_to_it():
    """Left in the scorer, they would be counted among the next training step's."""

    class FailingScorer(FakeScorer):
        def submit(self, key, response, gold):
            super().submit(key, response, gold)
            self.failures["timeout"] += key[1] == 0

    scorer = FailingScorer()
    metrics = evaluate(FakeEngine(coin(0.3)), scorer, make_prompts(5), fake_ranks(), k=2, seed=0, step=1)
    assert {key: metrics[key] for key in NO_FAILURES} == NO_FAILURES | {"eval/grading/timeout": 5}
    assert set(grading_failures(scorer, fake_ranks()).values()) == {0}


def test_without_held_out_prompts_there_is_nothing_to_report():
    """--eval_data "" turns evaluation off; a division by no prompts would end the run."""
    assert evaluate(None, None, [], None, k=4, seed=0, step=0) == {}
