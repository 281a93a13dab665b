"""Ave@k and Pass@k against brute force, errors and means, what an evaluation draws; the real command on the toy."""

import json
import math
import random
import re
import shutil
import statistics
from itertools import combinations, islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_data import write_jsonl
from test_prepare import contents, kill_after_lines, read, run
from test_sampler import FakeEngine, FakeScorer, FakeStore, assert_mean, coin, make_prompts, pool_of

import ada.eval
import ada.journal
import ada.prepare
from ada import UserError
from ada.data import shared_queue
from ada.eval import (
    all_right_at_k,
    combine,
    draw,
    evaluate,
    parse,
    pass_at_k,
    result,
    standard_error,
    summarise_eval,
    tables,
)
from ada.journal import find_model, short_name
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
            "eval/all_right@1": (1 / 4 + 0 + 1) / 3,
            "eval/all_right@2": 1 / 3,
            "eval/all_right@4": 1 / 3,
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


def test_all_right_is_neither_pass_nor_its_complement():
    """Fig. 2 has both; with 3 right of 4, half of the pairs are all right, none is all wrong, each has a right one."""
    summary = summarise_eval([pool_of("1011")], k=4)
    found = {key: value for key, value in summary.items() if "right" in key}
    assert found == {"eval/all_right@1": 3 / 4, "eval/all_right@2": 1 / 2, "eval/all_right@4": 0}
    assert summary["eval/pass@2"] == 1


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


# ---------------------------------------------------------------------------------- estimators and the table of results


def test_all_right_at_k_is_the_share_of_subsets_without_a_wrong_one():
    """Fig. 2's other curve; all wrong is 1 - pass@k. Together with the mixed subsets they are all there are."""
    for n in range(1, 9):
        for n_correct in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations([True] * n_correct + [False] * (n - n_correct), k))
                share = sum(map(all, subsets)) / len(subsets)
                assert all_right_at_k(n, n_correct, k) == pytest.approx(share), (n, n_correct, k)
                assert 1 - pass_at_k(n, n_correct, k) == pytest.approx(sum(not any(s) for s in subsets) / len(subsets))
    with pytest.raises(ValueError, match="needs at least 5 samples"):
        all_right_at_k(n=4, n_correct=4, k=5)


def test_bootstrap_errors_are_those_of_a_mean():
    """Near sd / sqrt(n), the formula for independent problems; the same again with the same seed; 0 where all agree."""
    values = [random.Random(i).random() ** 3 for i in range(400)]
    formula = statistics.pstdev(values) / math.sqrt(len(values))
    assert standard_error(values, seed=0) == pytest.approx(formula, rel=0.1)
    assert standard_error(values, seed=0) == standard_error(values, seed=0) != standard_error(values, seed=1)
    assert standard_error([0.25] * 50, seed=0) == 0


def test_weighted_mean_is_the_mean_over_all_prompts():
    """Weighted by prompts, a large benchmark counts for more; the plain mean is another number."""
    benchmarks = [[0.0, 1.0], [0.5] * 7, [0.25]]
    means, sizes = [statistics.mean(b) for b in benchmarks], [len(b) for b in benchmarks]
    assert combine(means, [0, 0, 0], sizes)[0] == pytest.approx(statistics.mean(sum(benchmarks, [])))
    assert combine(means, [0, 0, 0], [1, 1, 1])[0] == pytest.approx((0.5 + 0.5 + 0.25) / 3)


def test_error_of_a_weighted_mean_is_that_of_resampling_every_benchmark():
    """Against a bootstrap that draws the problems of each benchmark anew and averages over all of them."""
    rng = np.random.default_rng(0)
    benchmarks = [rng.random(60) ** 2, rng.random(200)]
    draws = [np.concatenate([rng.choice(b, len(b)) for b in benchmarks]).mean() for _ in range(4000)]
    errors = [standard_error(list(b), seed=i) for i, b in enumerate(benchmarks)]
    assert combine([0, 0], errors, [60, 200])[1] == pytest.approx(np.std(draws), rel=0.1)


def test_a_result_counts_what_was_scored():
    """By hand; a nominal k in a denominator would be wrong as soon as one response is missing."""
    row = result("m", "d", POOLS, k=4, seed=0)
    assert (row["prompts"], row["ave"]) == (3, pytest.approx((1 / 4 + 0 + 1) / 3))
    assert row["pass"] == pytest.approx({"1": (1 / 4 + 0 + 1) / 3, "2": 1.5 / 3, "4": 2 / 3})
    assert row["all_right"] == pytest.approx({"1": (1 / 4 + 0 + 1) / 3, "2": 1 / 3, "4": 1 / 3})
    assert (row["length"], row["truncated"]) == (2.5, 1 / 4)
    assert result("m", "d", [pool_of("10")], k=2, seed=0)["ave"] == 0.5


def test_the_table_has_a_column_per_benchmark_and_both_means():
    rows = [
        {"model": m, "data": d, "prompts": n, "k": 2, "ave": ave, "error": 0.01, "pass": {"1": ave, "2": ave},
         "all_right": {"1": ave, "2": ave}, "length": 7.0, "truncated": 0.5}
        for m, d, n, ave in [("base", "math500", 300, 0.5), ("base", "minerva", 100, 0.1),
                             ("trained", "math500", 300, 0.6), ("trained", "minerva", 100, 0.2)]
    ]  # fmt: skip
    lines = tables(rows, "Ave@2", ["a note"]).splitlines()
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("|")]
    assert cells[0] == ["model", "math500 (300)", "minerva (100)", "mean", "weighted"]
    assert cells[2] == ["base", "50.0 ± 1.0", "10.0 ± 1.0", "30.0 ± 0.7", "40.0 ± 0.8"]
    assert cells[3][0] == "trained" and cells[3][-1] == "50.0 ± 0.8"
    assert cells[4][:2] == ["model", "data"] and cells[4][-1] == "truncated" and len(cells) == 4 + 2 + 4
    assert lines[-1] == "a note"


# --------------------------------------------------------------------------------------------------- python -m ada.eval


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model=m", "--data=d"], None),
        (["--model", "m", "--data", "a/x.jsonl", "b/x.jsonl"], "--data: two of these have the same name"),
        (["--model", "a/b/m", "x/b/m", "--data", "d"], "--model: two of these have the same name"),
        (["--model=m", "--data=d", "--k=0"], "'0' is not a count"),
        (["--model=m", "--data=d", "--k=many"], "'many' is not a count"),
        (["--data=d"], "the following arguments are required: --model"),
        (["--model=m", "--data=d", "--colour=red"], "unrecognized arguments: --colour=red"),
    ],
)
def test_options(arguments, message):
    if message is None:
        options = parse(arguments)
        assert (options.k, options.max_tokens, options.greedy) == (32, 4096, False)  # the paper's
        return
    with pytest.raises(UserError, match=message):
        parse(arguments)


def test_a_run_stands_for_its_newest_checkpoint(tmp_path):
    """--model out/RUN; and other names stay what they are."""
    for step in ("step-000020", "step-000040", "step-000060.tmp"):
        (tmp_path / "run" / "checkpoints" / step).mkdir(parents=True)
        (tmp_path / "run" / "checkpoints" / step / "complete.json").write_text("{}")
    newest = tmp_path / "run" / "checkpoints" / "step-000040" / "hf"
    assert find_model(str(tmp_path / "run")) == str(newest) and short_name(str(newest)) == "run/step-000040"
    assert find_model("Qwen/Qwen3-4B-Instruct-2507") == "Qwen/Qwen3-4B-Instruct-2507"


def test_no_option_collides_with_torchrun():
    """torchrun reads the whole command line: an option that begins one of its own is "ambiguous" to it."""
    from torch.distributed.run import get_args_parser

    texts = (Path(ada.journal.__file__), Path(ada.eval.__file__), Path(ada.prepare.__file__))
    names = {name for path in texts for name in re.findall(r'"(--[a-z-]+)"', path.read_text())}
    assert len(names) >= 18
    for name in names:
        assert get_args_parser().parse_args(["-m", "ada.eval", name, "1"]).training_script_args == [name, "1"]


# Rows in the schemas of the public benchmarks (problems of our own). The toy cannot solve them; the mechanics must.
SLICES = {
    "math500": [{"problem": f"What is ${i}+1$?", "solution": "", "answer": str(i + 1)} for i in range(3)],
    "minerva_math": [
        {"problem": "How large is $s$?", "solution": r"So $s=\boxed{1.6}$ cm", "type": "Astronomy", "idx": 0},
        {"problem": "Where?", "solution": "Nowhere.", "type": "Astronomy", "idx": 1},  # no gold: dropped, and said
    ],
    "olympiadbench": [
        {"question": "How many moves?", "solution": ["Two."], "final_answer": ["2"], "unit": None, "context": None}
    ],
    "amc23": [{"id": 0, "problem": "How far?", "answer": 27.0, "url": "x", "question": "How far?"}],
}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory, toy_folder):
    """(folder, arguments, stdout): two models on four slices and a part of the toy's test set, uninterrupted."""
    folder = tmp_path_factory.mktemp("evaluated")
    shutil.copytree(toy_folder / "model", folder / "toys" / "copy")
    test = (toy_folder / "test.jsonl").read_text().splitlines()[:24]
    files = [write_jsonl(folder / "toy.jsonl", test)]
    files += [write_jsonl(folder / f"{name}.jsonl", rows) for name, rows in SLICES.items()]
    models = ["toy-demo/model", str(folder / "toys" / "copy")]
    arguments = ["ada.eval", "--model", *models, "--data", *files, "--k=8", "--max-tokens=24", "--plot"]
    status, out, err = run(*arguments, f"--out={folder / 'whole'}")
    assert status == 0, err
    return folder, arguments, out


def test_eval_writes_and_prints_what_it_promises(evaluated):
    """One table for both models; the numbers are those of the responses on disk."""
    folder, _, out = evaluated
    table = (folder / "whole" / "table.md").read_text()
    assert table in out and out.count("the first prompt is") == 10
    assert "toy (24)" in table and "minerva_math (1)" in table
    assert "minerva is graded by math-verify" in table and "minerva_math: 1 of 2 rows: 1 gold unreadable" in table
    assert (folder / "whole" / "pass_at_k.png").stat().st_size > 10_000
    results = json.loads((folder / "whole" / "results.json").read_text())
    assert [(r["model"], r["data"]) for r in results] == [
        (model, data) for model in ("toy-demo/model", "toys/copy") for data in ("toy", *SLICES)
    ]
    for r in results:
        responses = read(folder / "whole" / r["model"].replace("/", "--") / f"{r['data']}.jsonl")
        assert len(responses) == 8 * r["prompts"]
        assert r["ave"] == pytest.approx(sum(response["correct"] for response in responses) / len(responses))
        assert r["truncated"] == sum(response["truncated"] for response in responses) / len(responses)
    base, copy = results[:5], results[5:]
    assert base[0]["ave"] > 0.1  # the toy's own problems
    assert [r | {"model": ""} for r in base] == [r | {"model": ""} for r in copy]  # the same weights, the same seeds


def test_what_is_there_is_not_drawn_again(evaluated):
    """The same command only reports; with another k it is refused; a broken option costs nothing."""
    folder, arguments, out = evaluated
    before = contents(folder / "whole")
    status, again, err = run(*arguments, f"--out={folder / 'whole'}")
    assert status == 0 and "first prompt" not in again and contents(folder / "whole") == before, err
    status, _, err = run(*arguments, f"--out={folder / 'whole'}", "--k=4")
    assert status == 1 and "k was 8, is 4" in err and len(err.splitlines()) == 1
    assert contents(folder / "whole") == before


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_eval_goes_on_after_kill_9(evaluated, ranks):
    """Killed in the first model, in the second, in between: the files of the uninterrupted run on one rank."""
    folder, arguments, _ = evaluated
    killed = folder / f"killed{ranks}"
    kills = [
        kill_after_lines(lines, killed, *arguments, f"--out={killed}", ranks=ranks) for lines in (21, 160, 250, 400)
    ]
    assert any(kills)
    status, _, err = run(*arguments, f"--out={killed}", ranks=ranks)
    assert status == 0, err
    assert contents(killed) == contents(folder / "whole")


@pytest.mark.slow
def test_greedy_is_one_response_and_files_of_its_own(evaluated):
    folder, arguments, _ = evaluated
    before = contents(folder / "whole")
    status, out, err = run(*arguments, f"--out={folder / 'whole'}", "--greedy")
    assert status == 0 and "Greedy accuracy" in out, err
    after = contents(folder / "whole")
    assert all(after[name] == before[name] for name in before)
    assert {name for name in after.keys() - before.keys() if ".greedy" not in name} == set()
    results = json.loads((folder / "whole" / "results.greedy.json").read_text())
    assert all(list(r["pass"]) == ["1"] and r["ave"] == r["pass"]["1"] for r in results)
