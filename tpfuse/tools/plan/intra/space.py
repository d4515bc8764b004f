"""Every layout of every op of a stack of blocks on a mesh, and what each costs: the problem that the searches solve."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ....kernels.runtime.errors import check
from .. import split
from .conversions import COLLECTIVES, Conversions, Mesh, Taken
from .graph import ADD, ATTENTION, LINEAR, NORM, Graph, Op, Tensor
from .problem import Edge, Floats, Found, Pick, Problem
from .signatures import (
    BATCH,
    FORKED,
    PARTIAL,
    REPLICATE,
    SEQUENCE,
    SIGNATURES,
    TYPES,
    WIDTH,
    Layout,
    Signature,
    fits,
)

GRADIENTS = "gradients"  # seconds of the sums of weights' gradients
PARTS = *split.PARTS, GRADIENTS
Wanted = Sequence[Sequence[tuple[str, str]]]  # the types of input and output, of each op on each axis


class Rates(NamedTuple):
    """What a rank reaches: ``flops`` a second in GEMMs and in attention, ``bytes`` a second of its memory.

    ``micro_batches``: forward and backward passes for each sum of the weights' gradients.
    """

    flops: float
    bytes: float
    micro_batches: int = 1

    def checked(self) -> "Rates":
        """Returns itself; ValueError for what is not above 0."""
        check(min(self) > 0, f"plan: rates and micro_batches must be above 0, got {self}")
        return self


class Strategy(NamedTuple):
    """A signature for each axis, and what the op then costs a rank, conversions apart.

    ``computes``: its flops' or its bytes' seconds, whichever are more.  ``sums``: of its weights' gradients, whose
    bytes it sends.  ``memory``: bytes of its parameters' state.
    """

    signatures: tuple[Signature, ...]
    computes: float
    sums: float
    sent: float
    memory: float

    @property
    def input(self) -> Layout:
        return tuple(s.input for s in self.signatures)

    @property
    def output(self) -> Layout:
        return tuple(s.output for s in self.signatures)

    @property
    def weight(self) -> Layout:
        return tuple(s.weight for s in self.signatures)


class Space:
    """The layouts of a graph on a mesh; ``strategies[k]``: those of its k-th op that cut its tensors evenly;
    ``problem``: what they cost, without a limit on memory."""

    def __init__(self, graph: Graph, mesh: Mesh, rates: Rates):
        self.graph, self.mesh, self.rates = graph, mesh.checked(), rates.checked()
        self.strategies = [self._strategies(op) for op in graph.ops]
        self._ways: dict[Tensor, Conversions] = {}
        edges = [Edge(u, v, self._seconds(u, v)) for v, op in enumerate(graph.ops) for u in op.inputs]
        seconds = [np.array([s.computes + s.sums for s in some]) for some in self.strategies]
        memory = [np.array([s.memory for s in some]) for some in self.strategies]
        self.problem = Problem(seconds, memory, edges).checked()

    # ---- costs ----

    def _strategies(self, op: Op) -> list[Strategy]:
        tensor, found = self.graph.read(op), []
        for signatures in itertools.product(SIGNATURES[op.kind], repeat=len(self.mesh.sizes)):
            strategy = self._strategy(op, signatures)
            if fits(tensor, strategy.input, self.mesh.sizes) and fits(op.output, strategy.output, self.mesh.sizes):
                found.append(strategy)
        return found

    def _strategy(self, op: Op, signatures: tuple[Signature, ...]) -> Strategy:
        axes = list(zip(self.mesh.sizes, self.mesh.links, signatures))
        share = math.prod(n for n, _, s in axes if s.divides)
        weights = op.weights / math.prod(n for n, _, s in axes if s.weight != REPLICATE)
        moved = op.moved / share + 3 * weights * self.graph.element
        volumes = [(COLLECTIVES["all-reduce"].volume(n), link) for n, link, s in axes if s.sums]
        message = weights * self.graph.element / self.rates.micro_batches
        return Strategy(
            signatures,
            computes=max(op.flops / share / self.rates.flops, moved / self.rates.bytes),
            sums=sum(volume * message / link.bandwidth for volume, link in volumes),  # in buckets: no latency
            sent=sum(volume * message for volume, _ in volumes),
            memory=weights * self.graph.state,
        )

    def ways(self, tensor: Tensor) -> Conversions:
        """Returns the conversions of a tensor, which are found once."""
        if tensor not in self._ways:
            self._ways[tensor] = Conversions(self.mesh, tensor)
        return self._ways[tensor]

    def _seconds(self, u: int, v: int) -> Floats:
        ways = self.ways(self.graph.ops[u].output)
        sources = [ways.place[s.output] for s in self.strategies[u]]
        return ways.seconds[np.ix_(sources, [ways.place[s.input] for s in self.strategies[v]])]

    # ---- what a search has found ----

    def chosen(self, found: Found) -> list[Strategy]:
        """Returns the strategy of each op."""
        return [some[p] for some, p in zip(self.strategies, found.pick)]

    def paid(self, found: Found) -> list[tuple[Edge, list[Taken]]]:
        """Returns the edges along which the layout changes, and the steps that are taken there."""
        chosen = self.chosen(found)
        ways = [(e, self.ways(self.graph.ops[e.source].output)) for e in self.problem.edges]
        taken = [(e, way.way(chosen[e.source].output, chosen[e.to].input)) for e, way in ways]
        return [(edge, steps) for edge, steps in taken if steps]

    def parts(self, found: Found) -> dict[str, float]:
        """Returns seconds by PARTS."""
        seconds = dict.fromkeys(PARTS, 0.0)
        kinds = {LINEAR: split.GEMM, ATTENTION: split.ATTENTION}
        for op, strategy in zip(self.graph.ops, self.chosen(found)):
            seconds[kinds.get(op.kind, split.MEMORY)] += strategy.computes
            seconds[GRADIENTS] += strategy.sums
        seconds[split.TP] = sum(step.seconds for _, steps in self.paid(found) for step in steps)
        return seconds

    # ---- where a descent begins ----

    def nearest(self, wanted: Wanted) -> Pick:
        """Returns for each op the strategy that has most of what is wanted."""
        return tuple(
            max(range(len(some)), key=lambda i: _alike(some[i], types)) for some, types in zip(self.strategies, wanted)
        )

    def exactly(self, pick: Pick, wanted: Wanted) -> bool:
        """Returns whether strategies have all that is wanted."""
        whole = 2 * len(self.mesh.sizes)
        return all(_alike(some[i], types) == whole for some, i, types in zip(self.strategies, pick, wanted))

    def uniform(self, layout: Layout) -> Wanted:
        """Returns one layout for every tensor."""
        return [[(kind, kind) for kind in layout]] * len(self.graph.ops)

    def megatron(self, axes: Sequence[int]) -> Wanted:
        """Returns Megatron's tensor parallelism with sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198)
        on some axes of the mesh, and batches on the others."""
        wanted = []
        for op in self.graph.ops:
            on = (SEQUENCE, SEQUENCE) if op.kind in (NORM, ADD) else (WIDTH, WIDTH)
            if op.kind == LINEAR:
                after_a_norm = self.graph.ops[op.inputs[0]].kind == NORM
                on = (FORKED, WIDTH) if after_a_norm else (WIDTH, PARTIAL)
            wanted.append([on if k in axes else (BATCH, BATCH) for k in range(len(self.mesh.sizes))])
        return wanted

    def starts(self) -> list[Pick]:
        """Returns what is nearest to uniform layouts, and to Megatron's on each axis and on all."""
        every = range(len(self.mesh.sizes))
        kinds = [kind for kind in TYPES if kind not in (FORKED, PARTIAL)]
        wanted = [self.uniform(layout) for layout in itertools.product(kinds, repeat=len(self.mesh.sizes))]
        wanted += [self.megatron([k]) for k in every] + [self.megatron(every)]
        return list(dict.fromkeys(map(self.nearest, wanted)))


def _alike(strategy: Strategy, types: Sequence[tuple[str, str]]) -> int:
    return sum((s.input == a) + (s.output == b) for s, (a, b) in zip(strategy.signatures, types))
