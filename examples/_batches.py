"""A replica's part of each step: samples of a text, or packed documents; as micro-batches, or as the one batch
that a pipeline cuts itself."""

import argparse
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from _text import Text, documents, sample, windows
from torch import Tensor

from tpfuse.models import GPTConfig
from tpfuse.training.packing import Balance, PackedBatch, balance, document_cost, pack, packed_batch

IGNORED = -100  # a label that does not count


class Batches(NamedTuple):
    """The part of replica ``dp_rank`` in every batch.

    A sample is a function of the seed, the step and its number; with --pack the documents of a step are one of the seed
    and the step, and how they lie in rows is one of --dp, --micro-batches and whether there is a pipeline.
    """

    args: argparse.Namespace
    text: Text
    spans: np.ndarray | None  # of the documents, with --pack
    config: GPTConfig
    dp_rank: int
    device: torch.device

    def labels(self, step: int) -> int:
        """Returns how many bytes of a step are guessed, over all replicas."""
        if not self.args.pack:
            return self.args.batch * (self.args.seq - 1)
        return int((self.lengths(step) - 1).sum())

    def lengths(self, step: int) -> np.ndarray:
        """Returns how many bytes each document of a step has."""
        spans = self._spans(step)
        return spans[:, 1] - spans[:, 0]

    def balanced(self, step: int) -> Balance:
        """Returns which replica has which document of a step: by cost, so that none waits for another."""
        return balance([self._cost(length) for length in self.lengths(step)], self.args.dp)

    def micro_batches(self, step: int) -> list[dict]:
        """Returns the arguments of the model's calls in a step."""
        args = self.args
        if args.pack:
            return self._packed(step)
        size = args.batch // (args.dp * args.micro_batches)
        offset = self.dp_rank * args.micro_batches * size
        return [self._samples(step, offset + i * size, size) for i in range(args.micro_batches)]

    def merged(self, step: int) -> dict:
        """Returns the arguments of a pipeline's step, which cuts them into micro-batches."""
        local = self.args.batch // self.args.dp
        return self._packed_evenly(step) if self.args.pack else self._samples(step, self.dp_rank * local, local)

    def held_out(self) -> Iterator[dict]:
        """Yields the model's arguments for this replica's part of the held-out text; those of a pipeline, which sends
        one shape, are filled up with samples that do not count."""
        args = self.args
        local = args.batch // args.dp
        if args.pp == 1:
            for i, ids in enumerate(windows(self.text, args.seq, local // args.micro_batches)):
                if i % args.dp == self.dp_rank:
                    yield dict.fromkeys(("input_ids", "labels"), ids.to(self.device))
            return
        for window in windows(self.text, args.seq, args.batch):
            ids = window[self.dp_rank * local : (self.dp_rank + 1) * local].to(self.device)
            missing = 0, 0, 0, local - len(ids)
            yield dict(input_ids=F.pad(ids, missing), labels=F.pad(ids, missing, value=IGNORED))

    def _samples(self, step: int, offset: int, count: int) -> dict:
        args = self.args
        ids = sample(self.text, args.seq, args.batch, args.seed, step, range(offset, offset + count)).to(self.device)
        return dict(input_ids=ids, labels=ids, first_sample=offset)

    def _spans(self, step: int) -> np.ndarray:
        return documents(self.spans, self.args.batch * self.args.seq, self.args.seed, step)

    def _documents(self, step: int) -> list[Tensor]:
        """Returns this replica's documents of a step."""
        mine = self._spans(step)[self.balanced(step).shares[self.dp_rank]]
        texts = (self.text.train[start:end] for start, end in mine)
        return [torch.from_numpy(text.astype(np.int64)).to(self.device) for text in texts]

    def _packed(self, step: int) -> list[dict]:
        """A row of documents each; replicas may have unequal numbers of them, since gradients meet in the last only."""
        args, mine = self.args, self._documents(step)
        rows = pack([len(document) for document in mine], args.batch * args.seq // (args.dp * args.micro_batches))
        batches = [packed_batch([mine[d] for d in row])._asdict() for row in rows]
        return [batch | dict(first_sample=i * args.dp + self.dp_rank) for i, batch in enumerate(batches)]

    def _packed_evenly(self, step: int) -> dict:
        """A row a micro-batch, of documents that cost about the same: stages then wait least for one another.

        Rows are of one length, a multiple of --seq; what is left of one is documents that do not count.
        """
        args, mine = self.args, self._documents(step)
        shares = balance([self._cost(len(d)) for d in mine], min(len(mine), args.micro_batches)).shares
        shares += [[]] * (args.micro_batches - len(shares))
        room = max(sum(len(mine[d]) for d in share) for share in shares)
        room = -(-room // args.seq) * args.seq
        rows = []
        for share in shares:
            row = [mine[d] for d in share]
            free = room - sum(map(len, row))
            filling = torch.zeros(free, dtype=torch.int64, device=self.device).split(args.seq) if free else ()
            batch = packed_batch([*row, *filling])
            labels = batch.labels.clone()
            labels[:, room - free :] = IGNORED
            rows.append(batch._replace(labels=labels))
        packed = PackedBatch(*zip(*rows))._asdict()
        packed |= dict(input_ids=torch.cat(packed["input_ids"]), labels=torch.cat(packed["labels"]))
        return packed | dict(first_sample=self.dp_rank * args.micro_batches)

    def _cost(self, length: int) -> int:
        return document_cost(int(length), self.config)
