"""The update: FSDP2, log-probs in chunks, the clipped objective (Eq. 3), AdamW.

    trainer = Trainer(folder, ranks, lr=1e-6)
    metrics = trainer.update(groups, seed=seed, step=step, n_updates=4)     # groups: those of *all* ranks
    engine.sync(trainer.named_weights())

What keeps it exact:
  - One normaliser. The loss is a sum over tokens divided by the number of response tokens in the whole
    mini-batch over all ranks. So, rounding aside, it does not matter how the mini-batch is cut into
    micro-batches, padded or spread over ranks.
  - Every rank knows every group, so each can compute what all the others will do, and no collective is needed
    to agree on token counts or numbers of micro-batches.
  - Weights, gradients and optimiser state are fp32; on a GPU the forward and backward run in bf16. A step of
    1e-6 would be lost in bf16 weights.

Shapes: B rows, T tokens of a row with its padding, N response tokens of a micro-batch, H hidden, V vocabulary.
"""

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from ada import UserError
from ada.sampler import Group, seed_of

CHUNK_ELEMENTS = 1 << 26  # of a chunk's logits, 256 MiB in fp32; about four copies exist at once

# ----------------------------------------------------------------------------------------------------------------
# Ranks


@dataclass
class Ranks:
    """This process among the others."""

    rank: int
    world_size: int
    device: torch.device
    store: dist.Store  # shared memory of the ranks; its atomic add makes the prompt queue

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of forward and backward, of the engine and of exported models."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def gather(self, items: list, key: Callable | None = None) -> list:
        """Everybody's items in one list, the same on every rank: in order of rank, or sorted by `key`."""
        lists = [items]
        if self.world_size > 1:
            lists = [None] * self.world_size
            dist.all_gather_object(lists, items)
        everybody = [item for items in lists for item in items]
        return sorted(everybody, key=key) if key else everybody

    def barrier(self) -> None:
        if self.world_size > 1:
            self.gather([None])


def init_ranks() -> Ranks:
    """Join torchrun's ranks; a plain `python train.py` is one rank of one. gloo on CPUs, NCCL between GPUs."""
    if "RANK" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://"))
    else:
        # vLLM's external launcher reads these
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
        store, rank, world_size = dist.HashStore(), 0, 1
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    return Ranks(rank, world_size, device, store)


# ----------------------------------------------------------------------------------------------------------------
# From groups to micro-batches


@dataclass
class Row:
    """One response of a group, as the update sees it."""

    tokens: list[int]  # prompt and response
    n_prompt: int
    engine_logprobs: list[float]  # of the response
    advantage: float


@dataclass
class MicroBatch:
    """Rows side by side, padded on the right.

        tokens       p0 p1 r0 r1 r2        is_response   0  0  1  1  1
                     p0 p1 p2 r0 --                      0  0  0  1  0

    Nothing masks the padding in the attention: a causal model never looks to the right, so a row's log-probs are
    those of the row alone. Quantities of response tokens are flat, [N], row after row.
    """

    tokens_BT: Tensor
    is_response_BT: Tensor
    advantages_N: Tensor
    engine_logprobs_N: Tensor
    old_logprobs_N: Tensor | None = None  # None: this update is the first since sampling, old is what it computes


def rows_of(groups: list[Group], *, drop_truncated: bool = False) -> list[Row]:
    """All responses of the groups. Truncated ones stay (as the paper has it), or go from loss and token count alike."""
    return [
        Row(group.prompt.tokens + sample.tokens, len(group.prompt.tokens), sample.logprobs, advantage)
        for group in groups
        for sample, advantage in zip(group.samples, group.advantages, strict=True)
        if not (drop_truncated and sample.truncated)
    ]


def deal(rows: list[Row], world_size: int) -> list[list[Row]]:
    """Rows for each rank: longest first, each to the rank that has the fewest tokens so far."""
    shares, loads = [[] for _ in range(world_size)], [0] * world_size
    for row in sorted(rows, key=lambda row: -len(row.tokens)):
        lightest = loads.index(min(loads))
        shares[lightest].append(row)
        loads[lightest] += len(row.tokens)
    return shares


def cut(rows: list[Row], max_tokens: int) -> list[list[Row]]:
    """Rows, longest first, into micro-batches of at most `max_tokens` tokens, at most a tenth of them padding.

    A row that is longer than that goes alone.
    """
    batches, n_tokens = [], 0  # n_tokens: of the last micro-batch, without padding
    for row in rows:
        n_tokens += len(row.tokens)
        padded = len(batches[-1][0].tokens) * (len(batches[-1]) + 1) if batches else 0  # if this row joined it
        if batches and padded <= max_tokens and n_tokens >= 0.9 * padded:
            batches[-1].append(row)
        else:
            batches.append([row])
            n_tokens = len(row.tokens)
    return batches


def collate(rows: list[Row], device: torch.device) -> MicroBatch:
    """Pad and flatten. Without rows, N = 0: for a rank that only has to take part in the others' collectives."""
    rows = rows or [Row(tokens=[0, 0], n_prompt=2, engine_logprobs=[], advantage=0.0)]
    longest = max(len(row.tokens) for row in rows)
    tokens_BT = torch.zeros(len(rows), longest, dtype=torch.long)
    is_response_BT = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, row in enumerate(rows):
        tokens_BT[i, : len(row.tokens)] = torch.tensor(row.tokens)
        is_response_BT[i, row.n_prompt : len(row.tokens)] = True
    advantages = [row.advantage for row in rows for _ in row.engine_logprobs]
    engine_logprobs = [logprob for row in rows for logprob in row.engine_logprobs]
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


def _check_head(lm: nn.Module) -> None:
    """Raise UserError for a head that does more than multiply: `head_logprobs` would be silently wrong."""
    extras = [
        name for name in ("final_logit_softcapping", "logit_scale", "logits_scaling") if getattr(lm.config, name, 0)
    ]
    if lm.lm_head.bias is not None or extras:
        raise UserError(
            f"{lm.config._name_or_path}: its head has {', '.join(extras) or 'a bias'}, which the update lacks"
        )


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
        """Log-probs and entropies of the response tokens, [N] each, row after row."""
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
    logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor, *, eps_low: float, eps_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A) of each token (Eq. 3), [N].

    Also where the clip took the gradient away, two boolean [N]: above for A > 0, below for A < 0.

    rho is limited to e^20, or one token could overflow; far beyond the clip that changes nothing for A > 0.
    """
    ratio_N = (logprobs_N - old_logprobs_N).clamp(-20, 20).exp()
    clipped_N = ratio_N.clamp(1 - eps_low, 1 + eps_high)
    objective_N = torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    clip_high_N = (advantages_N > 0) & (ratio_N > 1 + eps_high)
    clip_low_N = (advantages_N < 0) & (ratio_N < 1 - eps_low)
    return objective_N, clip_high_N, clip_low_N


def importance_weights(trainer_logprobs_N: Tensor, engine_logprobs_N: Tensor, cap: float) -> Tensor:
    """min(exp(trainer - engine), cap) of each token, [N]: the engine drew it from a slightly other distribution.

    Truncated importance sampling; it corrects for kernels and precision, not for policy updates. 0 turns it off.
    """
    if cap == 0:
        return torch.ones_like(engine_logprobs_N)
    return (trainer_logprobs_N - engine_logprobs_N).detach().clamp(-20, 20).exp().clamp(max=cap)


# ----------------------------------------------------------------------------------------------------------------
# Trainer


class Tally:
    """Sums over response tokens, so that the means are exact however tokens are spread over micro-batches and ranks."""

    KEYS = ("update/loss", "policy/entropy", "update/clip_high", "update/clip_low", "engine/logprob_gap_mean")

    def __init__(self, device: torch.device):
        self.n_tokens = 0
        self.sums = torch.zeros(len(self.KEYS), dtype=torch.float64, device=device)
        self.gap_max = torch.zeros((), device=device)

    def add(self, loss_N: Tensor, entropy_N: Tensor, clip_high_N: Tensor, clip_low_N: Tensor, gap_N: Tensor) -> None:
        columns = (loss_N, entropy_N, clip_high_N, clip_low_N, gap_N)
        self.n_tokens += len(loss_N)
        self.sums += torch.stack([column.detach().double().sum() for column in columns])
        if len(gap_N):
            self.gap_max = torch.maximum(self.gap_max, gap_N.max())

    def means(self, ranks: Ranks) -> dict[str, float | None]:
        """Over the tokens of all ranks; None where there were none."""
        everybody = ranks.gather([(self.n_tokens, self.sums.tolist(), self.gap_max.item())])
        n_tokens = sum(n for n, _, _ in everybody)
        columns = zip(*(sums for _, sums, _ in everybody), strict=True)
        means = [sum(column) / n_tokens if n_tokens else None for column in columns]
        return {
            **dict(zip(self.KEYS, means, strict=True)),
            "engine/logprob_gap_max": max(gap for _, _, gap in everybody) if n_tokens else None,
            "update/tokens": n_tokens,
        }


class Trainer:
    """The policy under FSDP2 with its optimiser. Every method is collective: call it on all ranks.

    Args:
        folder: a Hugging Face model folder or hub name.
        lr, warmup_steps: constant after a linear warm-up, counted in iterations that had an update.
        weight_decay, max_grad_norm: of AdamW; the norm is the global one.
        eps_low, eps_high: the clip of Eq. 3.
        entropy_coef: weight of the mean token entropy in the objective.
        importance_cap: of the trainer/engine probability ratio; 0 = off.
        temperature: the sampling temperature; log-probs are those of the distribution that was sampled from.
        micro_batch_tokens: tokens, with padding, in one forward. A longer row goes alone.
        drop_truncated: leave truncated responses out of the update.
        activation_checkpointing: recompute each layer in the backward.
        cpu_offload: keep weights, gradients and optimiser state in host memory.
    """

    def __init__(
        self,
        folder: str,
        ranks: Ranks,
        *,
        lr: float,
        warmup_steps: int = 10,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        eps_low: float = 0.2,
        eps_high: float = 0.28,
        entropy_coef: float = 0.0,
        importance_cap: float = 2.0,
        temperature: float = 1.0,
        micro_batch_tokens: int = 16384,
        drop_truncated: bool = False,
        activation_checkpointing: bool = False,
        cpu_offload: bool = False,
    ):
        self.ranks = ranks
        self.max_grad_norm = max_grad_norm
        self.eps_low, self.eps_high = eps_low, eps_high
        self.entropy_coef = entropy_coef
        self.importance_cap = importance_cap
        self.micro_batch_tokens = micro_batch_tokens
        self.drop_truncated = drop_truncated

        lm = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation="sdpa")
        _check_head(lm)
        if activation_checkpointing:
            lm.gradient_checkpointing_enable({"use_reentrant": False})
        self.policy = Policy(lm, temperature, entropy_grad=entropy_coef != 0).train()
        self._shard(cpu_offload)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=lr, weight_decay=weight_decay)
        for weight in self.policy.parameters():  # as at its first step, or saving before that would count as one
            moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[weight] = {"step": torch.zeros(()), **moments}
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda iteration: min(1.0, (iteration + 1) / max(1, warmup_steps))
        )

    @property
    def lm(self) -> nn.Module:
        """The Hugging Face model; its parameters have their usual names, and are sharded."""
        return self.policy.lm

    def _shard(self, cpu_offload: bool) -> None:
        """FSDP2: each decoder layer gathers its weights when it runs, the root the rest."""
        options = dict(
            mesh=init_device_mesh(self.ranks.device.type, (self.ranks.world_size,)),
            mp_policy=MixedPrecisionPolicy(param_dtype=self.ranks.compute_dtype, reduce_dtype=torch.float32),
            offload_policy=CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
        )
        for layer in [*self.lm.model.layers, self.policy]:  # one after the other: only one is whole in fp32
            layer.to(torch.float32)
            fully_shard(layer, **options)
        for module in self.policy.modules():
            if isinstance(module, torch.distributed.fsdp.FSDPModule):
                # Gradients are summed over ranks, not averaged: the loss is already divided by the global token count.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight, whole, in the engine's dtype, in layer order, one at a time; a tied head under its own name."""
        for name, weight in self.lm.named_parameters(remove_duplicate=False):
            weight = weight.detach().to(self.ranks.compute_dtype)
            yield name, weight.full_tensor() if hasattr(weight, "full_tensor") else weight

    def update(self, groups: list[Group], *, seed: int, step: int, n_updates: int = 1) -> dict[str, float | None]:
        """One iteration's updates: the groups, shuffled, in `n_updates` mini-batches.

        Args:
            groups: those of all ranks, in the same order on every rank.

        Returns:
            Means over all response tokens of the iteration (None without any groups) and the largest of the
            gradient norms, alike on every rank.
        """
        groups = random.Random(seed_of("minibatch", seed, step)).sample(groups, len(groups))
        n_updates = min(n_updates, len(groups))
        plans = [self._plan(groups[i::n_updates]) for i in range(n_updates)]
        plans = [(micro_batches, n_tokens) for micro_batches, n_tokens in plans if n_tokens]
        for micro_batches, _ in plans[1:]:  # after the first update the policy is no longer the one that sampled
            self._remember_old_logprobs(micro_batches)

        tally, grad_norms = Tally(self.ranks.device), []
        for micro_batches, n_tokens in plans:
            self._backward(micro_batches, n_tokens, tally)
            grad_norms.append(self._step())
        if plans:
            self.schedule.step()
        return {
            **tally.means(self.ranks),
            "update/grad_norm": max(grad_norms, default=None),
            "update/updates": len(plans),
            "update/skipped": int(not plans),
        }

    def _plan(self, groups: list[Group]) -> tuple[list[MicroBatch], int]:
        """This rank's micro-batches of one mini-batch, and the number of response tokens on all ranks."""
        rows = rows_of(groups, drop_truncated=self.drop_truncated)
        cuts = [cut(share, self.micro_batch_tokens) for share in deal(rows, self.ranks.world_size)]
        mine = cuts[self.ranks.rank]
        missing = max(map(len, cuts)) - len(mine)  # FSDP's collectives want every rank in every forward
        micro_batches = [collate(rows, self.ranks.device) for rows in mine + [[]] * missing]
        return micro_batches, sum(len(row.engine_logprobs) for row in rows)

    @torch.no_grad()
    def _remember_old_logprobs(self, micro_batches: list[MicroBatch]) -> None:
        for batch in micro_batches:
            batch.old_logprobs_N, _ = self.policy(batch.tokens_BT, batch.is_response_BT)

    def _backward(self, micro_batches: list[MicroBatch], n_tokens: int, tally: Tally) -> None:
        """Gradient of the loss of one mini-batch; `n_tokens` is the number of its response tokens on all ranks."""
        for batch in micro_batches:
            logprobs_N, entropy_N = self.policy(batch.tokens_BT, batch.is_response_BT)
            old_N = logprobs_N.detach() if batch.old_logprobs_N is None else batch.old_logprobs_N
            objective_N, clip_high_N, clip_low_N = clipped_objective(
                logprobs_N, old_N, batch.advantages_N, eps_low=self.eps_low, eps_high=self.eps_high
            )
            weights_N = importance_weights(old_N, batch.engine_logprobs_N, self.importance_cap)
            loss_N = -(weights_N * objective_N + self.entropy_coef * entropy_N)
            (loss_N.sum() / n_tokens).backward()
            tally.add(loss_N, entropy_N, clip_high_N, clip_low_N, gap_N=(old_N - batch.engine_logprobs_N).abs())

    def _step(self) -> float:
        """One optimiser step; returns the global gradient norm before clipping."""
        norm = nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm, error_if_nonfinite=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm.full_tensor().item()
