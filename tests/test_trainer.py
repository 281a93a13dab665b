"""The update: exact whatever the cuts and the ranks, Eq. 3 by hand, against plain transformers, edge cases."""

import copy
import math
import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import (
    VOCABULARY,
    distance,
    equal,
    gradients_of,
    make_groups,
    make_trainer,
    run_on_ranks,
    weights_of,
)
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from ada import trainer as trainer_module
from ada.trainer import (
    Ranks,
    Row,
    Tally,
    clipped_objective,
    collate,
    cut,
    deal,
    head_logprobs,
    importance_weights,
    rows_of,
)

EXACT = 1e-5  # relative, fp32


def backward(trainer, groups) -> Tally:
    """The gradient of one mini-batch, left in the parameters."""
    tally = Tally(trainer.ranks.device)
    trainer.optimizer.zero_grad()
    trainer._backward(*trainer._plan(groups), tally)
    return tally


def count_forwards(trainer) -> list:
    """A list that grows with every forward of the policy."""
    forwards = []
    trainer.policy.register_forward_hook(lambda *_: forwards.append(None))
    return forwards


# ----------------------------------------------------------------------------------------------------------------
# One normaliser: the cut into micro-batches and the ranks change nothing

GROUPS = make_groups(6)
SCENARIOS = {  # name: groups, options, updates per iteration
    "uneven": (GROUPS, {"entropy_coef": 0.01}, 1),
    "accumulated": (GROUPS, {"entropy_coef": 0.01, "micro_batch_tokens": 60}, 1),
    "old log-probs": (GROUPS, {}, 3),
    "recomputed": (GROUPS, {"entropy_coef": 0.01, "activation_checkpointing": True}, 1),
    "one row": (make_groups(1, per_group=1), {}, 1),
    "truncated dropped": (GROUPS, {"drop_truncated": True}, 1),
    "none": ([], {}, 1),
}


def outcomes(ranks, folder: str) -> dict[str, dict]:
    """Per scenario: gradients of the whole batch, then metrics and weights of one iteration."""
    results = {}
    for name, (groups, options, n_updates) in SCENARIOS.items():
        trainer = make_trainer(folder, ranks, lr=1e-3, **options)
        micro_batches, _ = trainer._plan(groups)
        backward(trainer, groups)
        gradients = gradients_of(trainer) if groups else {}
        trainer.optimizer.zero_grad()
        metrics = trainer.update(groups, seed=0, step=1, n_updates=n_updates)
        results[name] = {
            "gradients": gradients,
            "metrics": metrics,
            "weights": weights_of(trainer),
            "rows": [len(batch.tokens_BT) for batch in micro_batches],
            "tokens": sum(len(batch.advantages_N) for batch in micro_batches),
        }
    return results


@pytest.fixture(scope="module")
def on_one_rank(ranks, model):
    return outcomes(ranks, model)


@pytest.fixture(scope="module", params=[2, 3], ids="{} ranks".format)
def on_ranks(request, model, tmp_path_factory) -> list[dict]:
    return run_on_ranks(outcomes, request.param, tmp_path_factory.mktemp("ranks") / "meet", model)


def test_seven_uneven_micro_batches_equal_one(ranks, model):
    rows = rows_of(GROUPS)
    n_tokens = sum(len(row.engine_logprobs) for row in rows)
    one = make_trainer(model, ranks, entropy_coef=0.01)
    one._backward([collate(rows, ranks.device)], n_tokens, whole_tally := Tally(ranks.device))

    random.Random(0).shuffle(rows)  # so the order of the rows differs, too
    sizes = [1, 2, 7, 1, 5, 3, 5]
    assert sum(sizes) == len(rows)
    pieces = [[rows.pop() for _ in range(size)] for size in sizes]
    seven = make_trainer(model, ranks, entropy_coef=0.01)
    seven._backward([collate(piece, ranks.device) for piece in pieces], n_tokens, tally := Tally(ranks.device))

    assert distance(gradients_of(seven), gradients_of(one)) < EXACT
    assert tally.means(ranks) == pytest.approx(whole_tally.means(ranks), rel=EXACT)


def test_ranks_change_neither_gradients_nor_weights_nor_metrics(on_one_rank, on_ranks):
    for name, expected in on_one_rank.items():
        for actual in on_ranks:
            assert distance(actual[name]["gradients"], expected["gradients"]) < EXACT, name
            assert distance(actual[name]["weights"], expected["weights"]) < EXACT, name
            assert actual[name]["metrics"].keys() == expected["metrics"].keys()
            for key, value in expected["metrics"].items():  # None where there were no tokens
                assert actual[name]["metrics"][key] == (value and pytest.approx(value, rel=EXACT)), (name, key)


def test_ranks_had_unequal_shares(on_ranks):
    """What the test above is about does happen: unequal tokens, and ranks without rows."""
    assert len({outcome["uneven"]["tokens"] for outcome in on_ranks}) > 1
    assert len({len(outcome["accumulated"]["rows"]) for outcome in on_ranks}) == 1  # the collectives want it
    assert sorted(outcome["one row"]["tokens"] > 0 for outcome in on_ranks) == [False] * (len(on_ranks) - 1) + [True]


def test_the_gradient_norm_is_the_global_one(on_one_rank, on_ranks):
    gradients = on_one_rank["uneven"]["gradients"]
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
    for outcome in [on_one_rank, *on_ranks]:
        assert outcome["uneven"]["metrics"]["update/grad_norm"] == pytest.approx(norm, rel=EXACT)


def test_activation_checkpointing_changes_no_gradient(on_one_rank, on_ranks):
    for outcome in [on_one_rank, *on_ranks]:
        assert distance(outcome["recomputed"]["gradients"], outcome["uneven"]["gradients"]) < EXACT


# ----------------------------------------------------------------------------------------------------------------
# Log-probs and entropy


@pytest.mark.parametrize("family", ["model", "llama"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_and_entropy_are_those_of_transformers_full_logits(request, ranks, family, temperature, monkeypatch):
    monkeypatch.setattr(trainer_module, "CHUNK_ELEMENTS", 7 * VOCABULARY)  # many chunks, the last one not full
    folder = request.getfixturevalue(family)
    trainer = make_trainer(folder, ranks, temperature=temperature)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = rows_of(make_groups(2))
    batch = collate(rows, ranks.device)
    logprobs_N, entropy_N = trainer.policy(batch.tokens_BT, batch.is_response_BT)

    expected, expected_entropy = [], []
    for row in rows:  # each alone, without padding
        tokens = torch.tensor(row.tokens)
        logps = torch.log_softmax(plain(tokens[None]).logits[0] / temperature, -1)
        for t in range(row.n_prompt, len(tokens)):
            expected.append(logps[t - 1, tokens[t]])
            expected_entropy.append(-(logps[t - 1].exp() * logps[t - 1]).sum())
    torch.testing.assert_close(logprobs_N, torch.stack(expected), rtol=EXACT, atol=1e-5)
    torch.testing.assert_close(entropy_N, torch.stack(expected_entropy), rtol=EXACT, atol=1e-5)


def test_a_row_in_a_padded_batch_has_the_logprobs_of_the_row_alone(ranks, model):
    trainer = make_trainer(model, ranks)
    rows = rows_of(GROUPS)
    assert len({len(row.tokens) for row in rows}) > 5
    batch = collate(rows, ranks.device)
    together = trainer.policy(batch.tokens_BT, batch.is_response_BT)
    for i, row in enumerate(rows):
        single = collate([row], ranks.device)
        assert single.tokens_BT.shape[1] == len(row.tokens)
        before = sum(len(row.engine_logprobs) for row in rows[:i])
        here = slice(before, before + len(row.engine_logprobs))
        for alone, padded in zip(trainer.policy(single.tokens_BT, single.is_response_BT), together, strict=True):
            torch.testing.assert_close(padded[here], alone, rtol=EXACT, atol=1e-5)


def test_what_stands_at_padded_places_is_never_seen(ranks, model):
    gradients = []
    for filler in (0, VOCABULARY - 1):
        trainer = make_trainer(model, ranks)
        batch = collate(rows := rows_of(GROUPS), ranks.device)
        for i, row in enumerate(rows):
            batch.tokens_BT[i, len(row.tokens) :] = filler
        trainer._backward([batch], len(batch.advantages_N), Tally(ranks.device))
        gradients.append(gradients_of(trainer))
    assert distance(*gradients) < EXACT


def test_entropy_has_a_gradient_only_if_its_coefficient_is_not_zero(ranks, model):
    hidden = torch.randn(5, 8, requires_grad=True)
    head, targets = torch.randn(11, 8), torch.arange(5)
    for wanted in (False, True):
        logprobs, entropy = head_logprobs(hidden, head, targets, temperature=1.0, entropy_grad=wanted)
        assert logprobs.requires_grad
        assert entropy.requires_grad == wanted
    (gradient,) = torch.autograd.grad(entropy.sum(), hidden)
    logps = torch.log_softmax(hidden @ head.T, -1)
    (expected,) = torch.autograd.grad(-(logps.exp() * logps).sum(), hidden)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)

    assert not make_trainer(model, ranks).policy.entropy_grad
    assert make_trainer(model, ranks, entropy_coef=1e-4).policy.entropy_grad


# ----------------------------------------------------------------------------------------------------------------
# Eq. 3

LOG = math.log


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "gradient", "clipped"),
    [  # eps_low 0.2, eps_high 0.28; the gradient is that of the log-prob
        (1.0, 2.0, 2.0, 2.0, ""),
        (1.1, 2.0, 2.2, 2.2, ""),
        (1.25, 2.0, 2.5, 2.5, ""),  # above 1 + eps_low, but it is eps_high that counts
        (1.5, 2.0, 2.56, 0.0, "high"),
        (0.5, 2.0, 1.0, 1.0, ""),  # the min leaves the way back open
        (1.5, -2.0, -3.0, -3.0, ""),  # likewise
        (0.9, -2.0, -1.8, -1.8, ""),
        (0.5, -2.0, -1.6, 0.0, "low"),
        (1.5, 0.0, 0.0, 0.0, ""),
        (0.5, 0.0, 0.0, 0.0, ""),
    ],
)
def test_clip_by_the_sign_of_the_advantage(ratio, advantage, objective, gradient, clipped):
    old = torch.tensor([-3.0])
    logprobs = (old + LOG(ratio)).requires_grad_()
    actual, high, low = clipped_objective(logprobs, old, torch.tensor([advantage]), eps_low=0.2, eps_high=0.28)
    actual.sum().backward()
    assert actual.item() == pytest.approx(objective, rel=1e-6)
    assert logprobs.grad.item() == pytest.approx(gradient, rel=1e-6)
    assert (high.item(), low.item()) == (clipped == "high", clipped == "low")


def test_importance_weight_by_hand():
    trainer = torch.tensor([-1.0, -1.0, -1.0, -500.0], requires_grad=True)
    engine = torch.tensor([-1.0, -1.0 + LOG(2), -1.0 - LOG(5), -0.5])
    weights = importance_weights(trainer, engine, cap=2.0)
    assert weights.tolist() == pytest.approx([1.0, 0.5, 2.0, 0.0], abs=1e-6)
    assert not weights.requires_grad
    assert importance_weights(trainer, engine, cap=3.0)[2].item() == pytest.approx(3.0)
    assert importance_weights(trainer, engine, cap=0).tolist() == [1.0] * 4


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-1000, 1000, width=32), st.floats(-50, 50, width=32)), min_size=1, max_size=8))
def test_no_log_ratio_makes_a_nan(cases):
    log_ratios, advantages = map(torch.tensor, zip(*cases, strict=True))
    old = torch.full_like(log_ratios, -2.0)
    logprobs = (old + log_ratios).requires_grad_()
    objective, _, _ = clipped_objective(logprobs, old, advantages, eps_low=0.2, eps_high=0.28)
    weights = importance_weights(logprobs, old, cap=2.0)
    (weights * objective).sum().backward()
    assert objective.isfinite().all()
    assert logprobs.grad.isfinite().all()
    assert ((weights >= 0) & (weights <= 2)).all()


@pytest.mark.parametrize("engine_logprob", [-1000.0, 0.0, 1000.0])
def test_no_engine_logprob_makes_a_nan(ranks, model, engine_logprob):
    groups = copy.deepcopy(GROUPS)
    for sample in (sample for group in groups for sample in group.samples):
        sample.logprobs = [engine_logprob] * len(sample.tokens)
    trainer = make_trainer(model, ranks)
    for key, value in trainer.update(groups, seed=0, step=1, n_updates=2).items():
        assert math.isfinite(value), key
    assert all(weight.isfinite().all() for weight in weights_of(trainer).values())


def test_losses_change_none_of_their_inputs(ranks, model):
    logprobs, old, advantages = torch.randn(3, 50).unbind()
    hidden, head, targets = torch.randn(50, 8), torch.randn(11, 8), torch.arange(50) % 11
    inputs = (logprobs, old, advantages, hidden, head, targets)
    before = [tensor.clone() for tensor in inputs]
    clipped_objective(logprobs, old, advantages, eps_low=0.2, eps_high=0.28)
    importance_weights(logprobs, old, cap=2.0)
    head_logprobs(hidden, head, targets, temperature=0.7, entropy_grad=True)
    assert all(torch.equal(*pair) for pair in zip(inputs, before, strict=True))

    groups = copy.deepcopy(GROUPS)
    make_trainer(model, ranks).update(groups, seed=0, step=1, n_updates=2)
    assert groups == GROUPS


def plain_loss(model, groups, old, options) -> torch.Tensor:
    """Eq. 3 the obvious way: row by row, token by token, from full logits. `old`: log-probs by (row, index, t)."""
    total, n_tokens = 0.0, 0
    for group in groups:
        for sample, advantage in zip(group.samples, group.advantages, strict=True):
            if options.get("drop_truncated") and sample.truncated:
                continue
            logps = plain_logps(model, group, sample, options)
            for t, token in enumerate(sample.tokens):
                new = logps[t, token]
                rho = (new - old.get((sample.row, sample.index, t), new.detach())).exp()
                term = torch.min(rho * advantage, rho.clip(0.8, 1.28) * advantage)
                if cap := options.get("importance_cap", 2.0):
                    before = old.get((sample.row, sample.index, t), new.detach())
                    term = term * min(math.exp(before - sample.logprobs[t]), cap)
                entropy = -(logps[t].exp() * logps[t]).sum()
                total = total - term - options.get("entropy_coef", 0.0) * entropy
                n_tokens += 1
    return total / n_tokens


def plain_logps(model, group, sample, options) -> torch.Tensor:
    """[T, V], of the response's tokens."""
    tokens = torch.tensor(group.prompt.tokens + sample.tokens)
    logps = F.log_softmax(model(tokens[None]).logits[0] / options.get("temperature", 1.0), -1)
    return logps[len(group.prompt.tokens) - 1 : -1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"importance_cap": 0.0},
        {"importance_cap": 1.1, "temperature": 0.7},
        {"entropy_coef": 0.05},
        {"drop_truncated": True, "entropy_coef": 0.05},
    ],
    ids=str,
)
def test_updates_are_those_of_a_plain_implementation(ranks, model, options):
    """Three updates in an iteration, the later ones with ratios other than 1 and clipped tokens."""
    trainer = make_trainer(model, ranks, micro_batch_tokens=100, **options)
    mini_batches, plan = [], trainer._plan
    trainer._plan = lambda groups: (mini_batches.append(groups), plan(groups))[1]
    metrics = trainer.update(GROUPS, seed=0, step=1, n_updates=3)
    assert metrics["update/updates"] == 3
    assert metrics["update/clip_high"] > 0
    assert metrics["update/clip_low"] > 0

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2 / 4, weight_decay=0.0)
    assert sorted(group.prompt.row for groups in mini_batches for group in groups) == [0, 1, 2, 3, 4, 5]
    with torch.no_grad():
        old = {
            (sample.row, sample.index, t): logps[t, token]
            for groups in mini_batches
            for group in groups
            for sample in group.samples
            for logps in [plain_logps(reference, group, sample, options)]
            for t, token in enumerate(sample.tokens)
        }
    norms = []
    for groups in mini_batches:
        plain_loss(reference, groups, old, options).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    assert distance(weights_of(trainer), dict(reference.named_parameters())) < EXACT
    assert metrics["update/grad_norm"] == pytest.approx(max(norms), rel=1e-4)


def test_dropped_truncated_responses_leave_numerator_and_denominator(ranks, model):
    """As if they had never been there."""
    trainer = make_trainer(model, ranks, drop_truncated=True)
    without = copy.deepcopy(GROUPS)
    for group in without:
        kept = [i for i, sample in enumerate(group.samples) if not sample.truncated]
        assert 0 < len(kept) < len(group.samples)
        group.samples = [group.samples[i] for i in kept]
        group.advantages = [group.advantages[i] for i in kept]
    expected = make_trainer(model, ranks)
    metrics = backward(trainer, GROUPS).means(ranks)
    assert metrics == backward(expected, without).means(ranks)
    assert metrics["update/tokens"] == sum(len(sample.tokens) for group in without for sample in group.samples)
    assert equal(gradients_of(trainer), gradients_of(expected))


# ----------------------------------------------------------------------------------------------------------------
# An iteration


def test_one_update_needs_one_forward_per_micro_batch(ranks, model):
    trainer = make_trainer(model, ranks, micro_batch_tokens=100)
    n_micro_batches = len(trainer._plan(GROUPS)[0])
    assert n_micro_batches > 3
    forwards = count_forwards(trainer)
    metrics = trainer.update(GROUPS, seed=0, step=1)
    assert len(forwards) == n_micro_batches
    assert metrics["update/clip_high"] == metrics["update/clip_low"] == 0  # the ratio is 1 everywhere


def test_later_updates_take_their_old_logprobs_from_before_the_first(ranks, model):
    trainer = make_trainer(model, ranks)
    forwards, seen = count_forwards(trainer), []
    one_backward = trainer._backward
    trainer._backward = lambda micro_batches, *rest: (seen.append(micro_batches), one_backward(micro_batches, *rest))
    trainer.update(GROUPS, seed=0, step=1, n_updates=3)

    n_first, n_later = len(seen[0]), len(seen[1]) + len(seen[2])
    assert len(forwards) == n_first + 2 * n_later  # the first mini-batch's are what its own forward computes
    assert all(batch.old_logprobs_N is None for batch in seen[0])
    untouched = make_trainer(model, ranks)
    for batch in seen[1] + seen[2]:
        with torch.no_grad():
            expected, _ = untouched.policy(batch.tokens_BT, batch.is_response_BT)
        assert torch.equal(batch.old_logprobs_N, expected)


def test_more_updates_than_groups(ranks, model):
    metrics = make_trainer(model, ranks).update(GROUPS[:2], seed=0, step=1, n_updates=5)
    assert metrics["update/updates"] == 2


def test_good_responses_become_likelier(ranks, model):
    trainer = make_trainer(model, ranks, importance_cap=0.0, warmup_steps=0)
    batch = collate(rows_of(GROUPS), ranks.device)
    good = batch.advantages_N > 0

    def advantage_of_good() -> float:
        with torch.no_grad():
            logprobs = trainer.policy(batch.tokens_BT, batch.is_response_BT)[0]
        return (logprobs[good].mean() - logprobs[~good].mean()).item()

    before, weights = advantage_of_good(), weights_of(trainer)
    for step in range(5):
        trainer.update(GROUPS, seed=0, step=step)
    assert advantage_of_good() > before + 0.1
    assert all(not torch.equal(weight, weights[name]) for name, weight in weights_of(trainer).items())


def test_bf16_compute_keeps_fp32_weights_that_a_step_of_1e_6_moves(ranks, model):
    class Bf16Ranks(Ranks):  # as on a GPU
        compute_dtype = torch.bfloat16

    trainer = make_trainer(model, Bf16Ranks(**vars(ranks)), lr=1e-6, warmup_steps=0)
    expected = make_trainer(model, ranks)
    backward(trainer, GROUPS)
    backward(expected, GROUPS)
    assert distance(gradients_of(trainer), gradients_of(expected)) < 0.1
    assert {weight.grad.dtype for weight in trainer.lm.parameters()} == {torch.float32}
    before = weights_of(trainer)
    trainer.update(GROUPS, seed=0, step=1)
    for name, weight in weights_of(trainer).items():
        assert weight.dtype == torch.float32
        moved = (weight - before[name]).abs().max().item()
        assert 0 < moved < 1e-5, name
    assert {weight.dtype for _, weight in trainer.named_weights()} == {torch.bfloat16}
    batch = collate(rows_of(GROUPS), ranks.device)
    assert {tensor.dtype for tensor in trainer.policy(batch.tokens_BT, batch.is_response_BT)} == {torch.float32}


@pytest.mark.parametrize("why", ["no groups", "all truncated"])
def test_an_empty_step_skips_optimiser_and_schedule(ranks, model, why):
    trainer = make_trainer(model, ranks, drop_truncated=True, weight_decay=0.1)
    trainer.update(GROUPS, seed=0, step=1)
    before, lr = weights_of(trainer), trainer.schedule.get_last_lr()
    groups = []
    if why == "all truncated":
        groups = copy.deepcopy(GROUPS)
        for sample in (sample for group in groups for sample in group.samples):
            sample.truncated = True
    forwards = count_forwards(trainer)
    metrics = trainer.update(groups, seed=0, step=2, n_updates=2)
    assert metrics["update/skipped"] == 1
    assert metrics["update/updates"] == metrics["update/tokens"] == 0
    assert metrics["update/loss"] is metrics["update/grad_norm"] is metrics["engine/logprob_gap_max"] is None
    assert forwards == []
    assert equal(weights_of(trainer), before)
    assert trainer.schedule.get_last_lr() == lr


def test_warm_up_counts_iterations_with_an_update(ranks, model):
    trainer = make_trainer(model, ranks, lr=0.8, warmup_steps=4, max_grad_norm=1e-6)
    used = []
    for step, groups in enumerate([GROUPS, [], GROUPS, GROUPS, [], GROUPS, GROUPS]):
        if groups:
            used.append(trainer.optimizer.param_groups[0]["lr"])
        trainer.update(groups, seed=0, step=step, n_updates=2)
    assert used == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])
    assert make_trainer(model, ranks, lr=0.8, warmup_steps=0).optimizer.param_groups[0]["lr"] == 0.8


def test_the_gradient_is_clipped_to_the_norm(ranks, model):
    trainer = make_trainer(model, ranks, max_grad_norm=1e-3)
    backward(trainer, GROUPS)
    clipped = []
    trainer.optimizer.step = lambda: clipped.extend(gradients_of(trainer).values())
    assert trainer._step() > 1e-3  # reported as it was
    assert torch.cat([gradient.flatten() for gradient in clipped]).norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_mini_batches_depend_on_seed_and_step_only(ranks, model):
    def order(seed: int, step: int) -> list[int]:
        trainer, rows = make_trainer(model, ranks), []
        trainer._plan = lambda groups: (rows.extend(group.prompt.row for group in groups), ([], 0))[1]
        trainer.update(GROUPS, seed=seed, step=step, n_updates=2)
        return rows

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(0, 2)
    assert order(0, 1) != order(1, 1)


@pytest.mark.parametrize("family", ["model", "llama"])
def test_named_weights_are_whole_and_have_transformers_names(request, ranks, family):
    folder = request.getfixturevalue(family)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = dict(make_trainer(folder, ranks).named_weights())
    assert equal(weights, plain.state_dict())
    assert not any(isinstance(weight, DTensor) for weight in weights.values())
    assert "lm_head.weight" in weights


# ----------------------------------------------------------------------------------------------------------------
# deal and cut


def blank_rows(lengths: list[int]) -> list[Row]:
    return [
        Row(tokens=[i] * length, n_prompt=1, engine_logprobs=[0.0], advantage=1.0) for i, length in enumerate(lengths)
    ]


def identities(rows: list[Row]) -> list[int]:
    return [row.tokens[0] for row in rows]


@settings(deadline=None)
@given(st.lists(st.integers(2, 300), max_size=60), st.integers(1, 5), st.integers(1, 2000))
def test_dealing_and_cutting_keeps_every_row_once_within_the_budget(lengths, world_size, max_tokens):
    rows = blank_rows(lengths)
    shares = deal(rows, world_size)
    assert len(shares) == world_size
    assert sorted(identities([row for share in shares for row in share])) == list(range(len(rows)))

    loads = [sum(len(row.tokens) for row in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)

    for share in shares:
        batches = cut(share, max_tokens)
        assert identities([row for batch in batches for row in batch]) == identities(share)
        for batch in batches:
            padded = len(batch) * max(len(row.tokens) for row in batch)
            assert len(batch) == 1 or padded <= max_tokens


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([9, 11, 13]), st.integers(1, 32)), min_size=1, max_size=256),
    st.integers(1, 3),
    st.sampled_from([256, 1024, 16384]),
)
def test_padding_is_under_a_tenth_of_the_tokens(lengths, world_size, max_tokens):
    """Prompts and responses as short, and as unequal, as the toy's can be."""
    for share in deal(blank_rows([prompt + response for prompt, response in lengths]), world_size):
        batches = cut(share, max_tokens)
        padded = sum(len(batch) * len(batch[0].tokens) for batch in batches)
        assert padded - sum(len(row.tokens) for row in share) <= 0.1 * padded


def test_no_rows_make_a_batch_without_response_tokens(ranks, model):
    trainer = make_trainer(model, ranks)
    batch = collate([], ranks.device)
    assert batch.is_response_BT.sum() == len(batch.advantages_N) == len(batch.engine_logprobs_N) == 0
    trainer._backward([batch], 5, tally := Tally(ranks.device))
    assert tally.n_tokens == 0
    assert all((gradient == 0).all() for gradient in gradients_of(trainer).values())
