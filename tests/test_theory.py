"""docs/method.md as tests: the derivations, the numbers, and the code that it quotes."""

import itertools
import json
import math
import re
from pathlib import Path

import pytest

from ada.sampler import Pool, Prompt, Sample, SamplingConfig, exit_balance, exit_fixed, exit_pos, make_groups
from experiments.theory import (
    SETTINGS,
    balance_limit,
    collapse,
    cost,
    exact_weight,
    expect,
    final_pools,
    grpo_std_limit,
    method_tables,
    monte_carlo,
    numbers,
    pool_mean,
    rounded,
    zero_variance_share,
)

ROOT = Path(__file__).parents[1]
DOC = (ROOT / "docs" / "method.md").read_text()
JSON = json.loads((ROOT / "docs" / "figures" / "method.json").read_text())
RIGHT_OF_16 = [k for k, times in enumerate(JSON["toy_right_of_16"]) for _ in range(times)]
NUMBERS = numbers(RIGHT_OF_16)
GRID = [0.01, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98, 0.99]


def slope(potential, p):
    return (potential(p + 1e-6) - potential(p - 1e-6)) / 2e-6


# ----------------------------------------------------------------------------------------------------------------
# Collapse and cost


@pytest.mark.parametrize("n", [1, 4, 7])
@pytest.mark.parametrize("p", [0.02, 0.5, 0.8])
def test_collapse_is_the_chance_of_zero_variance(p, n):
    """Counted over all 2^n groups."""
    groups = [group for group in itertools.product((0, 1), repeat=n) if len(set(group)) == 1]
    assert sum(p ** sum(group) * (1 - p) ** (n - sum(group)) for group in groups) == pytest.approx(collapse(p, n))


def test_zero_variance_share_counts_groups_and_is_unbiased():
    """Drawn from 16 coins, its mean is the collapse of one prompt; and of 2 of 16 it counts the pairs."""
    assert zero_variance_share([2], 2) == (pytest.approx(1 / 120), pytest.approx(91 / 120))
    p, n = 0.1, 4
    chances = [math.comb(16, k) * p**k * (1 - p) ** (16 - k) for k in range(17)]
    mean = sum(chance * sum(zero_variance_share([k], n)) for k, chance in enumerate(chances))
    assert mean == pytest.approx(collapse(p, n))


@pytest.mark.parametrize("sampler", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("p", GRID)
def test_final_pools_is_a_distribution_and_obeys_wald(p, sampler):
    """E[right] = p E[samples] under every rule: none makes right responses cheaper."""
    pools = final_pools(p, **sampler)
    assert sum(pools.values()) == pytest.approx(1)
    rounds = {(right + wrong) / sampler["round_size"] for right, wrong in pools}
    assert rounds <= set(range(1, sampler["max_rounds"] + 1))
    assert expect(pools, lambda right, wrong: right) == pytest.approx(p * expect(pools, lambda r, w: r + w))


def test_final_pools_asks_any_rule():
    """A rule of an experiment: stop at two right responses; beside it by hand, in rounds of 1 and 2."""

    def two_right(pool, n):
        return pool.n_correct >= 2

    p, q = 0.3, 0.7
    by_hand = {(2, 0): p * p, (2, 1): 2 * p * p * q, (1, 2): 3 * p * q * q, (0, 3): q**3}
    assert final_pools(p, two_right, round_size=1, max_rounds=3) == pytest.approx(by_hand)
    in_twos = {(2, 0): p * p, (3, 1): 2 * p**3 * q, (2, 2): 5 * p * p * q * q, (1, 3): 4 * p * q**3, (0, 4): q**4}
    assert final_pools(p, two_right, round_size=2, max_rounds=2) == pytest.approx(in_twos)


@pytest.mark.parametrize("p", GRID)
def test_cost_in_closed_form(p):
    """Section 4: samples of pos, and chances of a mixed pool. Balance ends without only if all 32 agree."""
    pos, balance = cost([p], **SETTINGS["pos"]), cost([p], **SETTINGS["balance"])
    assert pos["samples"] == pytest.approx(8 * (1 - (1 - p) ** 32) / (1 - (1 - p) ** 8))
    assert pos["mixed"] == pytest.approx(1 - p**8 - (1 - p) ** 32)
    assert balance["mixed"] == pytest.approx(1 - collapse(p, 32))
    assert balance["on_uniform"] == pytest.approx(32 * collapse(p, 32) / balance["samples"])
    for n in (4, 24):
        assert cost([p], **SETTINGS[f"grpo{n}"])["per_mixed"] == pytest.approx(n / (1 - collapse(p, n)))


def test_what_resolves():
    """One round of 4: balance resolves with 2 and 2 only; pos with 1 to 4 right."""
    one_round = {"n": 4, "round_size": 4, "max_rounds": 1}
    assert cost([0.3], exit_rule=exit_balance, **one_round)["on_unresolved"] == pytest.approx(1 - 6 * 0.3**2 * 0.7**2)
    assert cost([0.3], exit_rule=exit_pos, **one_round)["on_unresolved"] == pytest.approx(0.7**4)
    assert cost([0.3], exit_rule=exit_fixed, **one_round)["on_unresolved"] == 0


def test_cost_of_several_prompts_is_a_mean_of_prompts_and_a_ratio_of_sums():
    """Not a mean of ratios: a prompt that never gives a group would make that infinite."""
    together, hard, easy, never = (cost(rates, **SETTINGS["balance"]) for rates in ([0.1, 0.5, 0], [0.1], [0.5], [0]))
    assert together["samples"] == pytest.approx((hard["samples"] + easy["samples"] + 32) / 3)
    assert together["mixed"] == pytest.approx((hard["mixed"] + easy["mixed"]) / 3)
    assert together["per_mixed"] == pytest.approx(together["samples"] / together["mixed"])
    assert never["per_mixed"] == math.inf and never["on_unresolved"] == never["on_uniform"] == 1


def test_the_unflattering_claims():
    """Section 4, over the range of the figure."""
    for p in GRID:
        per_mixed = {name: cost([p], **sampler)["per_mixed"] for name, sampler in SETTINGS.items()}
        assert min(per_mixed, key=per_mixed.get) == "grpo4"
        assert 2 / (1 - collapse(p, 2)) < per_mixed["grpo4"]
    assert all(cost([p / 100], **SETTINGS["balance"])["samples"] < 10.35 for p in range(30, 71))


# ----------------------------------------------------------------------------------------------------------------
# Weights


@pytest.mark.parametrize("p", GRID)
def test_limits_are_slopes_of_their_potentials(p):
    """Sections 3 and 6: what the samplers climb."""

    def logit(p):
        return math.log(p / (1 - p))

    assert slope(lambda p: logit(p) / 2 - p, p) == pytest.approx(balance_limit(p), rel=1e-4)
    assert slope(lambda p: 2 * math.asin(math.sqrt(p)), p) == pytest.approx(grpo_std_limit(p), rel=1e-4)
    assert balance_limit(p) == pytest.approx(2 * slope(lambda p: logit(p) / 4, p) - 1, rel=1e-4)  # pool, group mean
    assert 1 / 4 <= balance_limit(p) * p * (1 - p) < 1 / 2  # the push on the log-odds


@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
def test_a_larger_budget_brings_balance_to_its_limit(p):
    """The weight is linear in the pool mean: once all pools resolve in the first round, its noise does nothing."""
    errors = [abs(exact_weight(p, exit_balance, round_size=size) / balance_limit(p) - 1) for size in (8, 32, 128)]
    assert errors == sorted(errors, reverse=True) and errors[0] > 0.01
    assert exact_weight(p, exit_balance, round_size=512, max_rounds=1) == pytest.approx(balance_limit(p), rel=1e-6)
    group_mean = exact_weight(p, exit_balance, round_size=128, baseline="group")
    assert group_mean == pytest.approx(1 / (4 * p * (1 - p)), rel=1e-6)


@pytest.mark.parametrize("p", GRID)
def test_grpo_in_closed_form(p):
    """REINFORCE times (n-1)/n without the std; with it the sum over the mixed groups of 4."""
    assert exact_weight(p, **SETTINGS["grpo4"]) == pytest.approx(3 / 4)
    assert exact_weight(p, **SETTINGS["grpo24"]) == pytest.approx(23 / 24)
    closed = math.sqrt(3) * (1 - 2 * p * (1 - p)) + 3 * p * (1 - p)
    assert exact_weight(p, **SETTINGS["grpo4"], normalize_std=True) == pytest.approx(closed, rel=1e-5)
    assert 1.616 < closed < 1.733


def test_grpo_with_the_std_reaches_its_limit():
    """Only with large groups."""
    ratios = [exact_weight(0.1, exit_fixed, n, n, 1, normalize_std=True) / grpo_std_limit(0.1) for n in (4, 32, 512)]
    assert ratios == sorted(ratios) and ratios[0] < 0.6 and ratios[2] == pytest.approx(1, abs=0.005)


def test_ceilings_at_both_ends():
    """Balance (NM-1)/n on either side, pos (M-1)/n for easy prompts; for hard ones a mean over its four stops."""
    for p in (1e-7, 1 - 1e-7):
        assert exact_weight(p, **SETTINGS["balance"]) == pytest.approx(31 / 4, rel=1e-4)
    assert exact_weight(1 - 1e-7, **SETTINGS["pos"]) == pytest.approx(7 / 4, rel=1e-4)
    hard = sum(8 * (1 - 1 / (8 * t)) / 4 for t in (1, 2, 3, 4))
    assert exact_weight(1e-7, **SETTINGS["pos"]) == pytest.approx(hard, rel=1e-4)


@pytest.mark.parametrize(
    "name, p, options",
    [
        ("balance", 0.05, {}),
        ("balance", 0.05, {"baseline": "group"}),
        ("balance", 0.1, {"normalize_std": True}),
        ("pos", 0.1, {}),
        ("pos", 0.9, {}),
        ("grpo4", 0.2, {"normalize_std": True}),
        ("grpo4", 0.5, {}),
    ],
)
def test_exact_weights_against_the_real_sampler(name, p, options):
    """The sum knows downsampling and advantages only by their formulas; the real functions must agree."""
    mean, error = monte_carlo(p, 3000, **SETTINGS[name], **options)
    exact = exact_weight(p, **SETTINGS[name], **options)
    assert 0 < error < 0.1 * exact  # a wide error would pass everything
    assert abs(mean - exact) < 4 * error


# ----------------------------------------------------------------------------------------------------------------
# Bias


def test_pool_mean_of_pos_in_rounds_of_one():
    """Section 6's series, and its sum, far above p."""
    for p in (0.1, 0.5):
        one_by_one = {"exit_rule": exit_pos, "round_size": 1, "max_rounds": 300}
        series = sum(p * (1 - p) ** (draws - 1) / draws for draws in range(1, 301))
        assert pool_mean(p, **one_by_one) == pytest.approx(series)
        assert series == pytest.approx(-p * math.log(p) / (1 - p))
        assert series > 1.3 * p


@pytest.mark.parametrize("p", [0.05, 0.1, 0.3, 0.8])
def test_directions_of_the_bias(p):
    """Pos upwards, balance towards 1/2 and symmetric, one round not at all."""
    assert pool_mean(p, **SETTINGS["grpo4"]) == pytest.approx(p)
    assert pool_mean(p, **SETTINGS["pos"]) > p
    balance = pool_mean(p, **SETTINGS["balance"])
    assert min(p, 0.5) < balance < max(p, 0.5)
    assert pool_mean(1 - p, **SETTINGS["balance"]) == pytest.approx(1 - balance)


def test_advantages_of_one_right_in_eight():
    """The table in section 6."""
    pool = Pool(Prompt(0, "", [], None), [Sample(0, i, [], [], "", False, correct=i < 1) for i in range(8)])
    for baseline, expected in (("global", [0.875] + [-0.125] * 3), ("group", [0.75] + [-0.25] * 3)):
        (group,) = make_groups([pool], SamplingConfig(baseline=baseline), step=0)
        assert sorted(group.advantages, reverse=True) == expected
        right, wrong = f"{expected[0]:g}", f"{expected[1]:g}"
        assert f"| {right} | {wrong} | {sum(expected):g} |" in DOC


# ----------------------------------------------------------------------------------------------------------------
# The document

# Every number in the text of docs/method.md that is not a setting; those are in formulas, between dollars.
CITED = """
it is {collapse[0.1][4]:.1%} for $n = 4$ and {collapse[0.1][32]:.1%} for $n = 32$
at $p = 0.02$ it is {collapse[0.02][4]:.1%} and {collapse[0.02][32]:.1%}
Of the groups of 4, {toy_uniform[4][wrong]:.1%} are all wrong and {toy_uniform[4][right]:.1%} all right
of the groups of 16 it is {toy_uniform[16][wrong]:.1%} and {toy_uniform[16][right]:.1%}
Balance gives a prompt with $p = 0.02$ {lift_balance:.1f} times the weight of one with $p = 0.5$
GRPO at $n = 4$ gives it {lift_grpo_std:.1f} times with the std and the same without
between {weight[0.5][grpo_std]:.2f} at $p = 0.5$ and {root_3:.2f} at the ends
$w \\to (NM - 1)/n$, here {ceiling_balance:.2f}
As $p \\to 1$, $w \\to (M - 1)/n$, here {ceiling_pos:.2f}
has {uniform_4:.1%} uniform ones, this row {plug_in_uniform_4:.1%}
At $p = 0.5$ it needs {cost[0.5][grpo4][per_mixed]:.1f} responses, balance {cost[0.5][balance][per_mixed]:.1f}
gives {filtering:.1f} times as many mixed groups on the toy
{toy_cost[balance][on_unresolved]:.0%} of the responses go to prompts that never resolve
and {toy_cost[balance][on_uniform]:.0%} to pools that end uniform
On the toy it draws {toy_cost[balance][samples]:.1f} responses per prompt and has {toy_cost[balance][mixed]:.1%} mixed
a fixed $n = 24$ has {toy_cost[grpo24][mixed]:.1%}
draws at most {cost[0.3][balance][samples]:.1f} responses
it draws {cost[0.98][pos][samples]:.1f} responses and has {cost[0.98][pos][mixed]:.1%} mixed pools
balance {cost[0.98][balance][samples]:.1f} and {cost[0.98][balance][mixed]:.1%}
advantages grow by at most {std_factor_4:.1f}
with 1 right response in 512 the factor is {std_factor_1_in_512:.1f}
has weight {weight[0.02][balance_std]:.1f} at $p = 0.02$ and {weight[0.5][balance_std]:.1f} at $p = 0.5$
a ratio of {lift_balance_std:.1f} instead of {lift_balance:.1f}
it is {weight[0.02][balance]:.2f} against {weight[0.02][balance_group_mean]:.2f}
""".strip().splitlines()


def lift(key):
    """The weight at p = 0.02 over that at 0.5."""
    return NUMBERS["weight"]["0.02"][key] / NUMBERS["weight"]["0.5"][key]


DERIVED = {
    "lift_balance": lift("balance"),
    "lift_balance_std": lift("balance_std"),
    "lift_grpo_std": lift("grpo_std"),
    "root_3": math.sqrt(3),
    "std_factor_4": 4 / math.sqrt(3),
    "ceiling_balance": 31 / 4,
    "ceiling_pos": 7 / 4,
    "uniform_4": sum(NUMBERS["toy_uniform"]["4"].values()),
    "plug_in_uniform_4": 1 - NUMBERS["toy_cost"]["grpo4"]["mixed"],
    "filtering": NUMBERS["toy_cost"]["balance"]["per_mixed"] / NUMBERS["toy_cost"]["grpo4"]["per_mixed"],
}


class Keyed(dict):
    """format() takes [4] for an integer; keys that came through JSON are strings."""

    def __getitem__(self, key):
        value = super().__getitem__(str(key))
        return Keyed(value) if isinstance(value, dict) else value


def cited():
    values = {key: Keyed(value) if isinstance(value, dict) else value for key, value in (NUMBERS | DERIVED).items()}
    return [sentence.format(**values) for sentence in CITED]


def test_method_json_is_not_stale():
    """Each number in it comes from the functions as they are, given the counts of the toy's base model."""
    assert rounded(NUMBERS) == JSON
    assert len(RIGHT_OF_16) == 1024


def test_tables_in_the_document_are_not_stale():
    """They occur as `python -m experiments.theory` prints them."""
    for table in method_tables(NUMBERS):
        assert table in DOC


@pytest.mark.parametrize("sentence", cited())
def test_numbers_in_the_document_are_not_stale(sentence):
    """The words around a number pin down which it is."""
    assert sentence in " ".join(DOC.split())


def test_no_other_number_is_in_the_document():
    """Take away what is checked, and formulas and settings: no decimals and no percentages are left."""
    text = re.sub(r"^```.*?^```", "", DOC, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^\|.*\|$|^    .*$", "", text, flags=re.MULTILINE)
    text = " ".join(text.split())
    for sentence in cited():
        assert sentence in text
        text = text.replace(sentence, "")
    text = re.sub(r"\$[^$]*\$|\]\([^)]*\)|arXiv [\d.]+", "", text)
    assert len(text) > 8000  # the patterns did not eat it
    assert re.findall(r"\d+\.\d+|\d+%", text) == []


def test_quoted_code_is_in_the_code():
    """Line for line, and in one piece."""
    sources = [(ROOT / "ada" / name).read_text() for name in ("sampler.py", "trainer.py")]
    quotes = re.findall(r"^```python\n(.*?)^```", DOC, flags=re.MULTILINE | re.DOTALL)
    assert len(quotes) == 9
    for quote in quotes:
        assert any(f"\n{quote}" in source for source in sources), quote
