"""The processes of a run: who this one is, what all of them know, who takes which prompt."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ada import UserError


@dataclass
class Ranks:
    """This process among the others."""

    rank: int
    world_size: int
    device: torch.device
    store: dist.Store  # shared memory of the ranks; its atomic add makes the queues

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

    def share(self, items: Sequence, name: str) -> Iterator:
        """Those of the items that no other rank has taken from the queue `name` yet, until there are none.

        So each rank takes items as fast as it gets through them. A name is good for one pass.
        """
        while (taken := self.store.add(name, 1)) <= len(items):
            yield items[taken - 1]

    def barrier(self) -> None:
        self.gather([])

    def on_rank_0(self, action: Callable[[], None]) -> None:
        """Do it there. If it fails with a UserError, every rank raises that, rather than wait for the first."""
        problem = None
        if self.rank == 0:
            try:
                action()
            except UserError as error:
                problem = error
        problem, *_ = self.gather([problem])
        if problem:
            raise problem


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
    if rank > 0:
        logging.getLogger("ada").setLevel(logging.ERROR)  # what all ranks read is reported once
    return Ranks(rank, world_size, device, store)
