"""A step under each setting of DistributedDataParallel, and under none."""

import argparse
import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bench.ddp import BUCKETS, MICRO_BATCHES
from tpfuse.models import GPT, GPTConfig

Step = Callable[[], None]


class Steps:
    """Makes the steps, each of a model of its own."""

    def __init__(self, args: argparse.Namespace):
        sizes = dict(max_positions=args.seq, hidden_size=args.width, num_layers=args.layers, num_heads=args.heads)
        rates = dict(dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0)
        self.model = GPT(GPTConfig(vocab_size=256, activation="gelu_tanh", **rates, **sizes))
        seed = torch.Generator().manual_seed(dist.get_rank())
        self.ids = torch.randint(256, (args.batch, args.seq), generator=seed)

    def all(self) -> dict[str, Step]:
        replicas = {name: self._replica(bucket_cap_mb=cap) for name, cap in BUCKETS.items()}
        replicas["copied gradients"] = self._replica(gradient_as_bucket_view=False)
        replicas["static graph"] = self._replica(static_graph=True)
        replicas |= {name: self._replica(count) for name, count in MICRO_BATCHES.items()}
        return replicas | self._apart()

    def _loss(self, model: Any) -> Tensor:
        loss: Tensor = model(self.ids, labels=self.ids).loss
        return loss

    def _replica(self, micro_batches: int = 1, **settings: Any) -> Step:
        replica = DistributedDataParallel(copy.deepcopy(self.model), **(dict(gradient_as_bucket_view=True) | settings))

        def step() -> None:
            for i in range(micro_batches):
                with contextlib.nullcontext() if i == micro_batches - 1 else replica.no_sync():
                    self._loss(replica).backward()
            replica.zero_grad()

        return step

    def _apart(self) -> dict[str, Step]:
        """Computing and messages one after the other, and each alone."""
        model = copy.deepcopy(self.model)
        parameters = list(model.parameters())
        flat = torch.zeros(sum(p.numel() for p in parameters))

        def forward() -> None:
            self._loss(model)

        def compute() -> None:
            self._loss(model).backward()
            model.zero_grad()

        def messages() -> None:
            dist.all_reduce(flat)

        def in_turn() -> None:
            self._loss(model).backward()
            gradients = [p.grad for p in parameters if p.grad is not None]
            torch.cat([g.flatten() for g in gradients], out=flat)
            dist.all_reduce(flat.div_(dist.get_world_size()))
            for g, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                g.copy_(mean.view_as(g))
            model.zero_grad()

        return {"no overlap": in_turn, "compute": compute, "forward": forward, "messages": messages}
