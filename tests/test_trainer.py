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

from ada import UserError
from ada import trainer as trainer_module
from ada.support.ranks import Ranks
from ada.trainer import (
    Sequence,
    TokenMeans,
    Trainer,
    TrainerConfig,
    clipped_objective,
    collate,
    head_logprobs,
    importance_weights,
    pack,
    sequences_of,
    spread_over_ranks,
)

EXACT = 1e-5  # relative, fp32


def backward(trainer, groups) -> dict:
    """The means of one mini-batch; its gradient is left in the parameters."""
    return backward_of(trainer, *trainer._micro_batches(groups))


def backward_of(trainer, micro_batches, n_tokens) -> dict:
    means = TokenMeans(trainer.ranks.device)
    trainer.optimizer.zero_grad()
    trainer._backward(micro_batches, n_tokens, means)
    return means.over(trainer.ranks)


def without_samples(groups, condition) -> list:
    """Copies of the groups without the samples of which `condition` holds."""
    copies = copy.deepcopy(groups)
    for group in copies:
        kept = [i for i, sample in enumerate(group.samples) if not condition(sample)]
        group.samples, group.advantages = ([of[i] for i in kept] for of in (group.samples, group.advantages))
    return copies


def count_forwards(trainer) -> list:
    """A list that grows with every forward of the policy."""
    forwards = []
    trainer.policy.register_forward_hook(lambda *_: forwards.append(None))
    return forwards


def watch_mini_batches(trainer, *, train: bool = True) -> list:
    """A list that gets the groups of each mini-batch; with train=False nothing is done with them."""
    seen, original = [], trainer._micro_batches
    trainer._micro_batches = lambda groups: (seen.append(groups), original(groups) if train else ([], 0))[1]
    return seen


# ----------------------------------------------------------------------------------------------------------------
# One normaliser: the cut into micro-batches and the ranks change nothing

GROUPS = make_groups(6)
SCENARIOS = {  # name: groups, options
    "uneven": (GROUPS, {"entropy_coef": 0.01}),
    "accumulated": (GROUPS, {"entropy_coef": 0.01, "micro_batch_tokens": 60}),
    "old log-probs": (GROUPS, {"updates_per_step": 3}),
    "recomputed": (GROUPS, {"entropy_coef": 0.01, "activation_checkpointing": True}),
    "one sequence": (make_groups(1, per_group=1), {}),
    "truncated dropped": (GROUPS, {"drop_truncated": True}),
    "more than prompts": (GROUPS, {"prompts_per_step": 4, "updates_per_step": 2}),
    "none": ([], {}),
}


def outcomes(ranks, folder: str) -> dict[str, dict]:
    """Per scenario: gradients of the whole batch, then metrics and weights of one iteration."""
    results = {}
    for name, (groups, options) in SCENARIOS.items():
        trainer = make_trainer(folder, ranks, lr=1e-3, **options)
        micro_batches, _ = trainer._micro_batches(groups)
        backward(trainer, groups)
        gradients = gradients_of(trainer) if groups else {}
        trainer.optimizer.zero_grad()
        metrics = trainer.update(groups, step=1)
        results[name] = {
            "gradients": gradients,
            "metrics": metrics,
            "weights": weights_of(trainer),
            "batches": len(micro_batches),
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
    sequences = sequences_of(GROUPS)
    n_tokens = sum(len(sequence.engine_logprobs) for sequence in sequences)
    one = make_trainer(model, ranks, entropy_coef=0.01)
    expected = backward_of(one, [collate(sequences, ranks.device)], n_tokens)

    random.Random(0).shuffle(sequences)  # so their order differs, too
    sizes = [1, 2, 7, 1, 5, 3, 5]
    assert sum(sizes) == len(sequences)
    pieces = [[sequences.pop() for _ in range(size)] for size in sizes]
    seven = make_trainer(model, ranks, entropy_coef=0.01)
    means = backward_of(seven, [collate(piece, ranks.device) for piece in pieces], n_tokens)

    assert distance(gradients_of(seven), gradients_of(one)) < EXACT
    assert means == pytest.approx(expected, rel=EXACT)


def test_ranks_change_neither_gradients_nor_weights_nor_metrics(on_one_rank, on_ranks):
    for name, expected in on_one_rank.items():
        for actual in on_ranks:
            assert distance(actual[name]["gradients"], expected["gradients"]) < EXACT, name
            assert distance(actual[name]["weights"], expected["weights"]) < EXACT, name
            assert actual[name]["metrics"].keys() == expected["metrics"].keys()
            for key, value in expected["metrics"].items():  # None where there were no tokens
                assert actual[name]["metrics"][key] == (value and pytest.approx(value, rel=EXACT)), (name, key)


def test_ranks_had_unequal_shares(on_ranks):
    """What the test above is about does happen: unequal tokens, and ranks without sequences."""
    assert len({outcome["uneven"]["tokens"] for outcome in on_ranks}) > 1
    assert len({outcome["accumulated"]["batches"] for outcome in on_ranks}) == 1  # the collectives want it
    assert sorted(outcome["one sequence"]["tokens"] > 0 for outcome in on_ranks)[-2:] == [False, True]


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
    sequences = sequences_of(GROUPS)
    assert len({len(sequence.tokens) for sequence in sequences}) > 5  # so there is padding
    batch = collate(sequences, ranks.device)
    logprobs_N, entropy_N = trainer.policy(batch.tokens_BT, batch.is_response_BT)

    expected, expected_entropy = [], []
    for sequence in sequences:  # each alone, without padding
        tokens = torch.tensor(sequence.tokens)
        logps = torch.log_softmax(plain(tokens[None]).logits[0] / temperature, -1)
        for t in range(sequence.n_prompt, len(tokens)):
            expected.append(logps[t - 1, tokens[t]])
            expected_entropy.append(-(logps[t - 1].exp() * logps[t - 1]).sum())
    torch.testing.assert_close(logprobs_N, torch.stack(expected), rtol=EXACT, atol=1e-5)
    torch.testing.assert_close(entropy_N, torch.stack(expected_entropy), rtol=EXACT, atol=1e-5)


def test_what_stands_at_padded_places_is_never_seen(ranks, model):
    gradients = []
    for filler in (0, VOCABULARY - 1):
        trainer = make_trainer(model, ranks)
        batch = collate(sequences := sequences_of(GROUPS), ranks.device)
        for i, sequence in enumerate(sequences):
            batch.tokens_BT[i, len(sequence.tokens) :] = filler
        backward_of(trainer, [batch], len(batch.advantages_N))
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
    [  # clip_low 0.2, clip_high 0.28; the gradient is that of the log-prob
        (1.0, 2.0, 2.0, 2.0, ""),
        (1.1, 2.0, 2.2, 2.2, ""),
        (1.25, 2.0, 2.5, 2.5, ""),  # above 1 + clip_low, but it is clip_high that counts
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
    actual, high, low = clipped_objective(logprobs, old, torch.tensor([advantage]), clip_low=0.2, clip_high=0.28)
    actual.sum().backward()
    assert actual.item() == pytest.approx(objective, rel=1e-6)
    assert logprobs.grad.item() == pytest.approx(gradient, rel=1e-6)
    assert (high.item(), low.item()) == (clipped == "high", clipped == "low")


def test_importance_weight_by_hand():
    trainer = torch.tensor([-1.0, -1.0, -1.0, -500.0])
    engine = torch.tensor([-1.0, -1.0 + LOG(2), -1.0 - LOG(5), -0.5])
    assert importance_weights(trainer - engine, cap=2.0).tolist() == pytest.approx([1.0, 0.5, 2.0, 0.0], abs=1e-6)
    assert importance_weights(trainer - engine, cap=3.0)[2].item() == pytest.approx(3.0)
    assert importance_weights(trainer - engine, cap=0).tolist() == [1.0] * 4


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-1000, 1000, width=32), st.floats(-50, 50, width=32)), min_size=1, max_size=8))
def test_no_log_ratio_makes_a_nan(cases):
    log_ratios, advantages = map(torch.tensor, zip(*cases, strict=True))
    old = torch.full_like(log_ratios, -2.0)
    logprobs = (old + log_ratios).requires_grad_()
    objective, _, _ = clipped_objective(logprobs, old, advantages, clip_low=0.2, clip_high=0.28)
    weights = importance_weights(log_ratios, cap=2.0)
    (weights * objective).sum().backward()
    assert objective.isfinite().all()
    assert logprobs.grad.isfinite().all()
    assert ((weights >= 0) & (weights <= 2)).all()


@pytest.mark.parametrize("engine_logprob", [-1000.0, 0.0, 1000.0])
def test_no_engine_logprob_makes_a_nan(ranks, model, engine_logprob):
    groups = copy.deepcopy(GROUPS)
    for sample in (sample for group in groups for sample in group.samples):
        sample.logprobs = [engine_logprob] * len(sample.tokens)
    trainer, before = make_trainer(model, ranks, updates_per_step=2), copy.deepcopy(groups)
    for key, value in trainer.update(groups, step=1).items():
        assert math.isfinite(value), key
    assert all(weight.isfinite().all() for weight in weights_of(trainer).values())
    assert groups == before, "the groups are logged afterwards"


@pytest.mark.parametrize("engine_logprob", [math.nan, -math.inf, math.inf])
def test_an_engine_logprob_that_is_no_number_costs_its_token_the_weight(ranks, model, engine_logprob):
    """One overflow among millions of tokens must not end a run, nor spoil what the other tokens teach."""
    broken, expected = copy.deepcopy(GROUPS), copy.deepcopy(GROUPS)
    trainers = make_trainer(model, ranks), make_trainer(model, ranks)
    tokens = broken[0].prompt.tokens + broken[0].samples[0].tokens
    with torch.no_grad():  # where the engine says what the trainer says, the weight is 1
        logprobs, _ = trainers[0].policy(
            torch.tensor([tokens]), torch.arange(len(tokens))[None] >= len(broken[0].prompt.tokens)
        )
    broken[0].samples[0].logprobs[0] = engine_logprob
    expected[0].samples[0].logprobs[0] = logprobs[0].item()
    metrics = [trainer.update(groups, step=1) for trainer, groups in zip(trainers, (broken, expected), strict=True)]
    assert [row.pop("engine/logprobs_not_finite") for row in metrics] == [1, 0]
    assert metrics[0] == pytest.approx(metrics[1], rel=EXACT)
    assert distance(*map(weights_of, trainers)) < EXACT


def plain_loss(model, groups, old, options) -> torch.Tensor:
    """Eq. 3 the obvious way: token by token, from full logits. `old`: log-probs by (prompt_id, index, t)."""
    total, n_tokens = 0.0, 0
    for group in groups:
        for sample, advantage in zip(group.samples, group.advantages, strict=True):
            if options.get("drop_truncated") and sample.truncated:
                continue
            logps = plain_logps(model, group, sample, options)
            for t, token in enumerate(sample.tokens):
                new = logps[t, token]
                before = old.get((sample.prompt_id, sample.index, t), new.detach())
                rho = (new - before).exp()
                term = torch.min(rho * advantage, rho.clip(0.8, 1.28) * advantage)
                if cap := options.get("importance_cap", 2.0):
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
    trainer = make_trainer(model, ranks, micro_batch_tokens=100, updates_per_step=3, **options)
    mini_batches = watch_mini_batches(trainer)
    metrics = trainer.update(GROUPS, step=1)
    assert metrics["update/updates"] == 3
    assert metrics["update/clip_high"] > 0 and metrics["update/clip_low"] > 0 and metrics["update/grad_norm"] > 1.0

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2 / 4, weight_decay=0.0)
    assert sorted(group.prompt.prompt_id for groups in mini_batches for group in groups) == [0, 1, 2, 3, 4, 5]
    with torch.no_grad():
        old = {
            (sample.prompt_id, sample.index, t): logps[t, token]
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
    without = without_samples(GROUPS, lambda sample: sample.truncated)
    assert all(0 < len(group.samples) < 4 for group in without)
    expected = make_trainer(model, ranks)
    metrics = backward(trainer, GROUPS)
    assert metrics == backward(expected, without)
    assert metrics["update/tokens"] == sum(len(sample.tokens) for group in without for sample in group.samples)
    assert equal(gradients_of(trainer), gradients_of(expected))


# ----------------------------------------------------------------------------------------------------------------
# An iteration


def test_one_update_needs_one_forward_per_micro_batch(ranks, model):
    trainer = make_trainer(model, ranks, micro_batch_tokens=100)
    n_micro_batches = len(trainer._micro_batches(GROUPS)[0])
    assert n_micro_batches > 3
    forwards = count_forwards(trainer)
    metrics = trainer.update(GROUPS, step=1)
    assert len(forwards) == n_micro_batches
    assert metrics["update/clip_high"] == metrics["update/clip_low"] == 0  # the ratio is 1 everywhere
    assert make_trainer(model, ranks, updates_per_step=5).update(GROUPS[:2], step=1)["update/updates"] == 2


def test_later_updates_take_their_old_logprobs_from_before_the_first(ranks, model):
    trainer = make_trainer(model, ranks, updates_per_step=3)
    forwards, seen = count_forwards(trainer), []
    one_backward = trainer._backward
    trainer._backward = lambda micro_batches, *rest: (seen.append(micro_batches), one_backward(micro_batches, *rest))
    trainer.update(GROUPS, step=1)

    n_first, n_later = len(seen[0]), len(seen[1]) + len(seen[2])
    assert len(forwards) == n_first + 2 * n_later  # the first mini-batch's are what its own forward computes
    assert all(batch.old_logprobs_N is None for batch in seen[0])
    untouched = make_trainer(model, ranks)
    for batch in seen[1] + seen[2]:
        with torch.no_grad():
            expected, _ = untouched.policy(batch.tokens_BT, batch.is_response_BT)
        assert torch.equal(batch.old_logprobs_N, expected)


def test_mini_batches_depend_on_seed_and_step_only(ranks, model):
    """More groups than an iteration has prompts, as passive filtering may bring, are cut at random."""
    trainer = make_trainer(model, ranks, prompts_per_step=4, updates_per_step=2)
    mini_batches = watch_mini_batches(trainer, train=False)

    def order(seed: int, step: int) -> list[int]:
        mini_batches.clear()
        trainer.config.seed = seed
        trainer.update(GROUPS, step=step)
        assert [len(groups) for groups in mini_batches] == [2, 2]
        return [group.prompt.prompt_id for groups in mini_batches for group in groups]

    orders = [order(seed, step) for seed in (0, 1) for step in (1, 2)]
    assert orders == [order(seed, step) for seed in (0, 1) for step in (1, 2)]
    assert len(set(map(tuple, orders))) == 4 and all(len(set(ids)) == 4 for ids in orders)
    assert set(sum(orders, [])) == set(range(len(GROUPS)))


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
    trainer.update(GROUPS, step=1)
    for name, weight in weights_of(trainer).items():
        assert weight.dtype == torch.float32
        moved = (weight - before[name]).abs().max().item()
        assert 0 < moved < 1e-5, name
    assert {weight.dtype for _, weight in trainer.named_weights()} == {torch.bfloat16}
    batch = collate(sequences_of(GROUPS), ranks.device)
    assert {tensor.dtype for tensor in trainer.policy(batch.tokens_BT, batch.is_response_BT)} == {torch.float32}


@pytest.mark.parametrize("why", ["no groups", "all truncated"])
def test_an_empty_step_skips_optimiser_and_schedule(ranks, model, why):
    trainer = make_trainer(model, ranks, drop_truncated=True, weight_decay=0.1, updates_per_step=2)
    trainer.update(GROUPS, step=1)
    before, lr = weights_of(trainer), trainer.schedule.get_last_lr()
    groups = []
    if why == "all truncated":
        groups = copy.deepcopy(GROUPS)
        for sample in (sample for group in groups for sample in group.samples):
            sample.truncated = True
    forwards = count_forwards(trainer)
    metrics = trainer.update(groups, step=2)
    assert metrics["update/skipped"] == 1
    assert metrics["update/updates"] == metrics["update/tokens"] == 0
    assert metrics["update/loss"] is metrics["update/grad_norm"] is metrics["engine/logprob_gap_max"] is None
    assert forwards == []
    assert equal(weights_of(trainer), before)
    assert trainer.schedule.get_last_lr() == lr


def test_warm_up_counts_iterations_with_an_update(ranks, model):
    trainer = make_trainer(model, ranks, lr=0.8, warmup_steps=4, max_grad_norm=1e-6, updates_per_step=2)
    used = []
    for step, groups in enumerate([GROUPS, [], GROUPS, GROUPS, [], GROUPS, GROUPS]):
        if groups:
            used.append(trainer.optimizer.param_groups[0]["lr"])
        trainer.update(groups, step=step)
    assert used == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])
    assert make_trainer(model, ranks, lr=0.8, warmup_steps=0).optimizer.param_groups[0]["lr"] == 0.8


@pytest.mark.parametrize("family", ["model", "llama"])
def test_named_weights_are_whole_and_have_transformers_names(request, ranks, family):
    folder = request.getfixturevalue(family)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = dict(make_trainer(folder, ranks).named_weights())
    assert equal(weights, plain.state_dict())
    assert not any(isinstance(weight, DTensor) for weight in weights.values())
    assert "lm_head.weight" in weights


# ----------------------------------------------------------------------------------------------------------------
# Models that would be trained or synced wrongly


@pytest.mark.parametrize("what", ["packs several matrices", "its head has a bias", "final_logit_softcapping", "lacks"])
def test_models_that_the_update_cannot_handle_are_refused_by_name(ranks, model, what, monkeypatch):
    """They would train, on log-probs that are not the engine's, or leave the engine with shuffled weights."""
    lm = AutoModelForCausalLM.from_pretrained(model)
    if what == "packs several matrices":
        lm.model.layers[1].mlp.experts = torch.nn.Parameter(torch.zeros(2, 3, 4))
    elif what == "its head has a bias":
        lm.lm_head = torch.nn.Linear(32, VOCABULARY, bias=True)
    elif what == "final_logit_softcapping":
        lm.config.final_logit_softcapping = 30.0
    else:
        del lm.model.layers
    monkeypatch.setattr(trainer_module.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: lm)
    with pytest.raises(UserError, match=f"{model}: .*{what}") as refused:
        Trainer(model, ranks, TrainerConfig())
    assert "\n" not in str(refused.value)


# ----------------------------------------------------------------------------------------------------------------
# spread_over_ranks and pack


def blank(lengths: list[int]) -> list[Sequence]:
    return [
        Sequence([i] * length, n_prompt=1, engine_logprobs=[0.0], advantage=1.0) for i, length in enumerate(lengths)
    ]


def identities(sequences: list[Sequence]) -> list[int]:
    return [sequence.tokens[0] for sequence in sequences]


@settings(deadline=None)
@given(st.lists(st.integers(2, 300), max_size=60), st.integers(1, 5), st.integers(1, 2000))
def test_spreading_and_packing_keeps_every_sequence_once_within_the_budget(lengths, world_size, max_tokens):
    shares = spread_over_ranks(blank(lengths), world_size)
    assert len(shares) == world_size
    assert sorted(identities([sequence for share in shares for sequence in share])) == list(range(len(lengths)))

    loads = [sum(len(sequence.tokens) for sequence in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)

    for share in shares:
        batches = pack(share, max_tokens)
        assert identities([sequence for batch in batches for sequence in batch]) == identities(share)
        for batch in batches:
            padded = len(batch) * max(len(sequence.tokens) for sequence in batch)
            assert len(batch) == 1 or padded <= max_tokens


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([9, 11, 13]), st.integers(1, 32)), min_size=1, max_size=256),
    st.integers(1, 3),
    st.sampled_from([256, 1024, 16384]),
)
def test_padding_is_under_a_tenth_of_the_tokens(lengths, world_size, max_tokens):
    """Prompts and responses as short, and as unequal, as the toy's can be."""
    for share in spread_over_ranks(blank([sum(pair) for pair in lengths]), world_size):
        padded = sum(len(batch) * len(batch[0].tokens) for batch in pack(share, max_tokens))
        assert padded - sum(len(sequence.tokens) for sequence in share) <= 0.1 * padded


def test_no_sequences_make_a_batch_without_response_tokens(ranks, model):
    trainer = make_trainer(model, ranks)
    batch = collate([], ranks.device)
    assert batch.is_response_BT.sum() == len(batch.advantages_N) == len(batch.engine_logprobs_N) == 0
    assert backward_of(trainer, [batch], 5)["update/tokens"] == 0
    assert all((gradient == 0).all() for gradient in gradients_of(trainer).values())
