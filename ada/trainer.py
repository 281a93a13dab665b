"""The update: FSDP2, log-probs in chunks, the clipped objective (Eq. 3), AdamW.

    trainer = Trainer(folder, ranks, config)
    metrics = trainer.update(groups, step=step)     # groups: those of *all* ranks
    engine.sync(trainer.named_weights())

What keeps it exact:
  - One normaliser. The loss is a sum over tokens divided by the number of response tokens in the whole
    mini-batch over all ranks. So, rounding aside, it does not matter how the mini-batch is cut into
    micro-batches, padded or spread over ranks.
  - Every rank knows every group, so each can compute what all the others will do, and no collective is needed
    to agree on token counts or numbers of micro-batches.
  - Weights, gradients and optimiser state are fp32; on a GPU the forward and backward run in bf16. A step of
    1e-6 would be lost in bf16 weights.

Shapes: B sequences, T tokens of one with its padding, N response tokens of a micro-batch, H hidden, V vocabulary.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from ada import UserError, option
from ada.engine import EngineConfig
from ada.sampler import Group, SamplingConfig, seed_of
from ada.support.ranks import Ranks

CHUNK_ELEMENTS = 1 << 26  # of a chunk's logits, 256 MiB in fp32; about four copies exist at once


@dataclass
class TrainerConfig(SamplingConfig, EngineConfig):
    """Options of the update (Eq. 3), which must know how its responses were sampled."""

    updates_per_step: int = option(1, "mini-batches, hence optimiser steps, per iteration", at_least=1)
    lr: float = option(5e-4, "learning rate, constant after the warm-up", at_least=0)
    warmup_steps: int = option(10, "iterations of linear warm-up, counted where there was an update", at_least=0)
    weight_decay: float = option(0.0, "of AdamW", at_least=0)
    max_grad_norm: float = option(1.0, "gradients are clipped to this global norm", above=0)
    clip_low: float = option(0.2, "clip of the ratio from below", at_least=0, below=1)
    clip_high: float = option(0.28, "clip of the ratio from above", at_least=0)
    entropy_coef: float = option(0.0, "weight of the entropy bonus; paper 1e-4, its released script 0", at_least=0)
    importance_cap: float = option(
        2.0, "each token's weight is its trainer/engine probability ratio, at most this; 0 = no weights", at_least=0
    )
    drop_truncated: bool = option(False, "leave truncated responses out of the update")
    micro_batch_tokens: int = option(
        16384, "tokens, padding included, per forward; a longer one goes alone", at_least=1
    )
    activation_checkpointing: bool = option(False, "recompute layers in the backward: less memory, more time")
    cpu_offload: bool = option(False, "weights and optimiser state in host memory; set OMP_NUM_THREADS, too")


# ----------------------------------------------------------------------------------------------------------------
# From groups to micro-batches


@dataclass
class Sequence:
    """A prompt with one response of its group, as the update sees it."""

    tokens: list[int]  # prompt and response
    n_prompt: int
    engine_logprobs: list[float]  # of the response
    advantage: float


@dataclass
class MicroBatch:
    """Sequences side by side, padded on the right.

        tokens       p0 p1 r0 r1 r2        is_response   0  0  1  1  1
                     p0 p1 p2 r0 --                      0  0  0  1  0

    Nothing masks the padding in the attention: a causal model never looks to the right, so a sequence's log-probs are
    those of the sequence alone. Quantities of response tokens are flat, [N], one sequence after the other.
    """

    tokens_BT: Tensor
    is_response_BT: Tensor
    advantages_N: Tensor
    engine_logprobs_N: Tensor
    old_logprobs_N: Tensor | None = None  # None: this update is the first since sampling, old is what it computes


def sequences_of(groups: list[Group], *, drop_truncated: bool = False) -> list[Sequence]:
    """All responses of the groups. Truncated ones stay (as the paper has it), or go from loss and token count alike."""
    return [
        Sequence(group.prompt.tokens + sample.tokens, len(group.prompt.tokens), sample.logprobs, advantage)
        for group in groups
        for sample, advantage in zip(group.samples, group.advantages, strict=True)
        if not (drop_truncated and sample.truncated)
    ]


def spread_over_ranks(sequences: list[Sequence], world_size: int) -> list[list[Sequence]]:
    """Sequences for each rank: longest first, each to the rank that has the fewest tokens so far."""
    shares, loads = [[] for _ in range(world_size)], [0] * world_size
    for sequence in sorted(sequences, key=lambda sequence: -len(sequence.tokens)):
        lightest = loads.index(min(loads))
        shares[lightest].append(sequence)
        loads[lightest] += len(sequence.tokens)
    return shares


def pack(sequences: list[Sequence], max_tokens: int) -> list[list[Sequence]]:
    """Sequences, longest first, into micro-batches of at most `max_tokens` tokens, at most a tenth of them padding.

    A sequence that is longer than that goes alone.
    """
    batches, n_tokens = [], 0  # n_tokens: of the last micro-batch, without padding
    for sequence in sequences:
        n_tokens += len(sequence.tokens)
        padded = len(batches[-1][0].tokens) * (len(batches[-1]) + 1) if batches else 0  # if this one joined it
        if batches and padded <= max_tokens and n_tokens >= 0.9 * padded:
            batches[-1].append(sequence)
        else:
            batches.append([sequence])
            n_tokens = len(sequence.tokens)
    return batches


def collate(sequences: list[Sequence], device: torch.device) -> MicroBatch:
    """Pad and flatten. Without sequences, N = 0: for a rank that only has to take part in the others' collectives."""
    sequences = sequences or [Sequence(tokens=[0, 0], n_prompt=2, engine_logprobs=[], advantage=0.0)]
    longest = max(len(sequence.tokens) for sequence in sequences)
    tokens_BT = torch.zeros(len(sequences), longest, dtype=torch.long)
    is_response_BT = torch.zeros(len(sequences), longest, dtype=torch.bool)
    for i, sequence in enumerate(sequences):
        tokens_BT[i, : len(sequence.tokens)] = torch.tensor(sequence.tokens)
        is_response_BT[i, sequence.n_prompt : len(sequence.tokens)] = True
    advantages = [sequence.advantage for sequence in sequences for _ in sequence.engine_logprobs]
    engine_logprobs = [logprob for sequence in sequences for logprob in sequence.engine_logprobs]
    return MicroBatch(
        tokens_BT.to(device),
        is_response_BT.to(device),
        torch.tensor(advantages, device=device),
        torch.tensor(engine_logprobs, device=device),
    )


# ----------------------------------------------------------------------------------------------------------------
# Log-probs without [B, T, V]


def head_logprobs(
    hidden_NH: Tensor, head_VH: Tensor, targets_N: Tensor, *, temperature: float, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution, both [N], fp32, nats, at the sampling temperature.

    Goes through the head in chunks and forgets their logits; the backward computes each chunk's again. On a GPU the
    product with the head is in bf16, like the rest of the model, and everything after it in fp32.
    """

    def one_chunk(hidden_CH, head_VH, targets_C):
        # Few copies of [C, V] at once: in place where autograd allows, the dot product instead of a product and a sum.
        logps_CV = F.linear(hidden_CH, head_VH).float().div_(temperature).log_softmax(-1)
        logprobs_C = logps_CV.gather(-1, targets_C[:, None])[:, 0]
        with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
            entropy_C = -torch.linalg.vecdot(logps_CV.exp(), logps_CV)  # H = -sum p log p
        return logprobs_C, entropy_C

    chunk = max(1, CHUNK_ELEMENTS // head_VH.shape[0])
    results = [
        checkpoint(one_chunk, hidden_CH, head_VH, targets_C, use_reentrant=False)
        for hidden_CH, targets_C in zip(hidden_NH.split(chunk), targets_N.split(chunk), strict=True)
    ]
    logprobs, entropies = zip(*results, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _check_model(lm: nn.Module) -> None:
    """Raise UserError where the update, or the engine after a sync, would be silently wrong."""
    what = None
    if not hasattr(lm, "lm_head") or not hasattr(getattr(lm, "model", None), "layers"):
        what = f"{type(lm).__name__} lacks model.layers or lm_head, on which the update relies"
    elif lm.lm_head.bias is not None:
        what = "its head has a bias, which the update lacks"
    for extra in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(lm.config, extra, 0):
            what = f"its head has {extra}, which the update lacks"
    for name, weight in lm.named_parameters():
        if weight.ndim > 2:
            what = f"{name} packs several matrices (experts), which vLLM would take wrongly after an update"
    if what:
        raise UserError(f"{lm.config._name_or_path}: {what}")


class Policy(nn.Module):
    """A causal language model whose forward ends in log-probs instead of logits.

    The head runs inside this forward because FSDP gathers the root's weights, the head among them, around it.
    """

    def __init__(self, lm: nn.Module, temperature: float, entropy_grad: bool):
        super().__init__()
        self.lm = lm
        self.temperature = temperature
        self.entropy_grad = entropy_grad

    def forward(self, tokens_BT: Tensor, is_response_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the response tokens, [N] each, one sequence after the other."""
        hidden_BTH = self.lm.model(input_ids=tokens_BT, use_cache=False).last_hidden_state
        # The hidden state at t predicts the token at t + 1.
        predicts_response = is_response_BT[:, 1:]
        return head_logprobs(
            hidden_BTH[:, :-1][predicts_response],
            self.lm.lm_head.weight,
            tokens_BT[:, 1:][predicts_response],
            temperature=self.temperature,
            entropy_grad=self.entropy_grad,
        )


# ----------------------------------------------------------------------------------------------------------------
# The objective (Eq. 3)


def clipped_objective(
    logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) of each token (Eq. 3), [N].

    Also where the clip took the gradient away, two boolean [N]: above for A > 0, below for A < 0.

    rho is limited to e^20, or one token could overflow; far beyond the clip that changes nothing for A > 0.
    """
    ratio_N = (logprobs_N - old_logprobs_N).clamp(-20, 20).exp()
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    objective_N = torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    is_clipped_high_N = (advantages_N > 0) & (ratio_N > 1 + clip_high)
    is_clipped_low_N = (advantages_N < 0) & (ratio_N < 1 - clip_low)
    return objective_N, is_clipped_high_N, is_clipped_low_N


def importance_weights(log_ratio_N: Tensor, cap: float) -> Tensor:
    """min(exp(log_ratio), cap) of each token, [N]; log_ratio is the trainer's log-prob less the engine's.

    Truncated importance sampling: the engine drew the token from a slightly other distribution. It corrects for
    kernels and precision, not for policy updates. A cap of 0 turns it off.
    """
    return log_ratio_N.clamp(-20, 20).exp().clamp(max=cap) if cap else torch.ones_like(log_ratio_N)


# ----------------------------------------------------------------------------------------------------------------
# Trainer


class TokenMeans:
    """Means over response tokens, exact however the tokens are spread over micro-batches and ranks."""

    KEYS = ("update/loss", "policy/entropy", "update/clip_high", "update/clip_low", "engine/logprob_gap_mean")

    def __init__(self, device: torch.device):
        self.n_tokens = 0
        self.sums = torch.zeros(len(self.KEYS), dtype=torch.float64, device=device)
        self.gap_max = torch.zeros((), device=device)
        self.n_not_finite = torch.zeros((), dtype=torch.long, device=device)

    def add(self, columns_N: dict[str, Tensor], is_finite_N: Tensor) -> None:
        """One micro-batch: a column for each of KEYS, and which of the engine's log-probs were finite numbers."""
        gap_N = columns_N["engine/logprob_gap_mean"]
        self.n_tokens += len(gap_N)
        self.sums += torch.stack([columns_N[key].detach().double().sum() for key in self.KEYS])
        self.gap_max = torch.maximum(self.gap_max, gap_N.max()) if len(gap_N) else self.gap_max
        self.n_not_finite += (~is_finite_N).sum()

    def over(self, ranks: Ranks) -> dict[str, float | None]:
        """The means over the tokens of all ranks; None where there were none."""
        own = (self.n_tokens, self.sums.tolist(), self.gap_max.item(), self.n_not_finite.item())
        n_tokens, sums, gaps, not_finite = zip(*ranks.gather([own]), strict=True)
        total = sum(n_tokens)
        means = [sum(column) / total if total else None for column in zip(*sums, strict=True)]
        return {
            **dict(zip(self.KEYS, means, strict=True)),
            "engine/logprob_gap_max": max(gaps) if total else None,
            "engine/logprobs_not_finite": sum(not_finite),
            "update/tokens": total,
        }


class Trainer:
    """The policy under FSDP2 with its optimiser. Every method is collective: call it on all ranks.

    Args:
        folder: a Hugging Face model folder or hub name.

    Raises:
        UserError: a model that the update or the sync would handle wrongly.
    """

    def __init__(self, folder: str, ranks: Ranks, config: TrainerConfig):
        self.ranks = ranks
        self.config = config
        lm = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation="sdpa")
        _check_model(lm)
        if config.activation_checkpointing:
            lm.gradient_checkpointing_enable({"use_reentrant": False})
        self.policy = Policy(lm, config.temperature, entropy_grad=config.entropy_coef != 0).train()
        self._shard()
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        for weight in self.policy.parameters():  # as at its first step, or saving before that would count as one
            moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[weight] = {"step": torch.zeros(()), **moments}
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda iteration: min(1.0, (iteration + 1) / max(1, config.warmup_steps))
        )

    @property
    def lm(self) -> nn.Module:
        """The Hugging Face model; its parameters have their usual names, and are sharded."""
        return self.policy.lm

    def _shard(self) -> None:
        """FSDP2: each decoder layer gathers its weights when it runs, the root the rest."""
        options = dict(
            mesh=init_device_mesh(self.ranks.device.type, (self.ranks.world_size,)),
            mp_policy=MixedPrecisionPolicy(param_dtype=self.ranks.compute_dtype, reduce_dtype=torch.float32),
            offload_policy=CPUOffloadPolicy() if self.config.cpu_offload else OffloadPolicy(),
        )
        for layer in [*self.lm.model.layers, self.policy]:  # one after the other: only one is whole in fp32
            layer.to(torch.float32)
            fully_shard(layer, **options)
        for module in self.policy.modules():
            if isinstance(module, FSDPModule):
                # Gradients are summed over ranks, not averaged: the loss is already divided by the global token count.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight, whole, in the engine's dtype, in layer order, one at a time; a tied head under its own name."""
        for name, weight in self.lm.named_parameters(remove_duplicate=False):
            weight = weight.detach().to(self.ranks.compute_dtype)
            yield name, weight.full_tensor() if hasattr(weight, "full_tensor") else weight

    def update(self, groups: list[Group], *, step: int) -> dict[str, float | None]:
        """One iteration's updates: the groups, shuffled, in `updates_per_step` mini-batches.

        Args:
            groups: those of all ranks, in the same order on every rank. A sampler may bring more than the iteration
                has prompts (passive filtering can): then so many of them are used, drawn at random.

        Returns:
            Means over all response tokens of the iteration (None without any groups) and the largest of the
            gradient norms, alike on every rank.
        """
        rng = random.Random(seed_of("minibatch", self.config.seed, step))
        groups = rng.sample(groups, min(len(groups), self.config.prompts_per_step))
        n_updates = min(len(groups), self.config.updates_per_step)
        mini_batches = [self._micro_batches(groups[i::n_updates]) for i in range(n_updates)]
        mini_batches = [(micro_batches, n_tokens) for micro_batches, n_tokens in mini_batches if n_tokens]
        for micro_batches, _ in mini_batches[1:]:  # after the first update the policy isn't the one that sampled
            self._remember_old_logprobs(micro_batches)

        means, grad_norms = TokenMeans(self.ranks.device), []
        for micro_batches, n_tokens in mini_batches:
            self._backward(micro_batches, n_tokens, means)
            grad_norms.append(self._optimizer_step())
        if mini_batches:
            self.schedule.step()
        return {
            **means.over(self.ranks),
            "update/groups": len(groups),
            "update/grad_norm": max(grad_norms, default=None),
            "update/updates": len(mini_batches),
            "update/skipped": int(not mini_batches),
        }

    def _micro_batches(self, groups: list[Group]) -> tuple[list[MicroBatch], int]:
        """This rank's micro-batches of one mini-batch, and the number of response tokens on all ranks."""
        sequences = sequences_of(groups, drop_truncated=self.config.drop_truncated)
        shares = spread_over_ranks(sequences, self.ranks.world_size)
        packed = [pack(share, self.config.micro_batch_tokens) for share in shares]
        mine = packed[self.ranks.rank]
        missing = max(map(len, packed)) - len(mine)  # FSDP's collectives want every rank in every forward
        micro_batches = [collate(batch, self.ranks.device) for batch in mine + [[]] * missing]
        return micro_batches, sum(len(sequence.engine_logprobs) for sequence in sequences)

    @torch.no_grad()
    def _remember_old_logprobs(self, micro_batches: list[MicroBatch]) -> None:
        for batch in micro_batches:
            batch.old_logprobs_N, _ = self.policy(batch.tokens_BT, batch.is_response_BT)

    def _backward(self, micro_batches: list[MicroBatch], n_tokens: int, means: TokenMeans) -> None:
        """Gradient of the loss of one mini-batch; `n_tokens` is the number of its response tokens on all ranks."""
        config = self.config
        for batch in micro_batches:
            logprobs_N, entropy_N = self.policy(batch.tokens_BT, batch.is_response_BT)
            old_N = logprobs_N.detach() if batch.old_logprobs_N is None else batch.old_logprobs_N
            objective_N, is_clipped_high_N, is_clipped_low_N = clipped_objective(
                logprobs_N, old_N, batch.advantages_N, clip_low=config.clip_low, clip_high=config.clip_high
            )
            is_finite_N = batch.engine_logprobs_N.isfinite()  # an engine's rare overflow costs its token the weight
            log_ratio_N = (old_N - batch.engine_logprobs_N).where(is_finite_N, 0.0)
            weights_N = importance_weights(log_ratio_N, config.importance_cap)
            loss_N = -(weights_N * objective_N + config.entropy_coef * entropy_N)
            (loss_N.sum() / n_tokens).backward()
            columns_N = {
                "update/loss": loss_N,
                "policy/entropy": entropy_N,
                "update/clip_high": is_clipped_high_N,
                "update/clip_low": is_clipped_low_N,
                "engine/logprob_gap_mean": log_ratio_N.abs(),
            }
            means.add(columns_N, is_finite_N)

    def _optimizer_step(self) -> float:
        """Returns the global gradient norm before clipping."""
        norm = nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.max_grad_norm, error_if_nonfinite=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm.full_tensor().item()
