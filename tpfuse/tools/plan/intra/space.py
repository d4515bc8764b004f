"""All layouts of the ops of a stack of blocks on a mesh, with their costs: the problem that the searches solve."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ....kernels.runtime.errors import check
from .. import split
from .conversions import COLLECTIVES, Conversions, ConversionStep, Mesh
from .graph import ACTIVATION, ADD, ATTENTION, LINEAR, NORM, BlockOp, Graph, Tensor
from .problem import Edge, Floats, Pick, Problem, Solution
from .signatures import BATCH, FORKED, PARTIAL, REPLICATE, SEQUENCE, SIGNATURES, TYPES, WIDTH, Layout, Signature, fits

GRADIENTS = "gradients"  # seconds of the sums of weights' gradients
PARTS = split.GEMM, split.ATTENTION, split.MEMORY, split.TP, GRADIENTS
SCHEMES = "dp", "cp", "tp"  # what the library runs on an axis
TargetTypes = Sequence[Sequence[tuple[str, str]]]  # types of input and output, of each op on each axis


class Rates(NamedTuple):
    """Rates that a rank reaches: ``flops`` a second in GEMMs and in attention, ``bytes`` a second of its memory.

    ``micro_batches``: forward and backward passes per sum of the weights' gradients.
    """

    flops: float
    bytes: float
    micro_batches: int = 1

    def checked(self) -> "Rates":
        """Returns itself; ValueError for a value that is not above 0."""
        check(min(self) > 0, f"plan: rates and micro_batches must be above 0, got {self}")
        return self


class Strategy(NamedTuple):
    """A signature for each axis, and the op's cost on a rank without conversions.

    ``computes``: seconds of its flops or of its bytes, whichever are more.  ``sums``, ``sent``: seconds and bytes of
    the sums of its weights' gradients.  ``memory``: bytes of its parameters' state.
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
    """The layouts of a graph on a mesh.

    ``strategies[k]``: those of its k-th op that cut its tensors evenly.  ``problem``: their costs, without a limit on
    memory.
    """

    def __init__(self, graph: Graph, mesh: Mesh, rates: Rates):
        self.graph, self.mesh, self.rates = graph, mesh.checked(), rates.checked()
        self.strategies = [self._strategies(op) for op in graph.ops]
        self._conversions: dict[Tensor, Conversions] = {}
        edges = [Edge(u, v, self._seconds(u, v)) for v, op in enumerate(graph.ops) for u in op.inputs]
        seconds = [np.array([s.computes + s.sums for s in op]) for op in self.strategies]
        memory = [np.array([s.memory for s in op]) for op in self.strategies]
        self.problem = Problem(seconds, memory, edges).checked()

    # ---- costs ----

    def _strategies(self, op: BlockOp) -> list[Strategy]:
        tensor, sizes = self.graph.read(op), self.mesh.sizes
        signatures = itertools.product(SIGNATURES[op.kind], repeat=len(sizes))
        strategies = (self._strategy(op, signature) for signature in signatures)
        return [s for s in strategies if fits(tensor, s.input, sizes) and fits(op.output, s.output, sizes)]

    def _strategy(self, op: BlockOp, signatures: tuple[Signature, ...]) -> Strategy:
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

    def conversions(self, op: int) -> Conversions:
        """Returns the conversions of the output of the op of this index."""
        tensor = self.graph.ops[op].output
        if tensor not in self._conversions:
            self._conversions[tensor] = Conversions(self.mesh, tensor)
        return self._conversions[tensor]

    def _seconds(self, u: int, v: int) -> Floats:
        conversions = self.conversions(u)
        outputs = [conversions.index[s.output] for s in self.strategies[u]]
        return conversions.seconds[np.ix_(outputs, [conversions.index[s.input] for s in self.strategies[v]])]

    # ---- of a solution ----

    def chosen(self, solution: Solution) -> list[Strategy]:
        return [strategies[p] for strategies, p in zip(self.strategies, solution.pick)]

    def changes(self, solution: Solution) -> list[tuple[Edge, list[ConversionStep]]]:
        """Returns the edges along which the layout changes, with the steps of each."""
        chosen = self.chosen(solution)
        path = lambda e: self.conversions(e.source).path(chosen[e.source].output, chosen[e.to].input)
        return [(edge, steps) for edge in self.problem.edges if (steps := path(edge))]

    def parts(self, solution: Solution) -> dict[str, float]:
        """Returns seconds by PARTS."""
        seconds = dict.fromkeys(PARTS, 0.0)
        kinds = {LINEAR: split.GEMM, ATTENTION: split.ATTENTION}
        for op, strategy in zip(self.graph.ops, self.chosen(solution)):
            seconds[kinds.get(op.kind, split.MEMORY)] += strategy.computes
            seconds[GRADIENTS] += strategy.sums
        seconds[split.TP] = sum(step.seconds for _, steps in self.changes(solution) for step in steps)
        return seconds

    # ---- starts of a descent ----

    def nearest(self, targets: TargetTypes) -> Pick:
        """Returns for each op the strategy that has most of the target types."""
        return tuple(
            max(range(len(s)), key=lambda i: _matches(s[i], types)) for s, types in zip(self.strategies, targets)
        )

    def exactly(self, pick: Pick, targets: TargetTypes) -> bool:
        full = 2 * len(self.mesh.sizes)
        return all(_matches(s[i], types) == full for s, i, types in zip(self.strategies, pick, targets))

    def uniform(self, layout: Layout) -> TargetTypes:
        return [[(kind, kind) for kind in layout]] * len(self.graph.ops)

    def schemed(self, schemes: Sequence[str]) -> TargetTypes:
        """Returns the layouts of what the library runs on each axis, "dp", "cp" or "tp"."""
        return [[self._schemed(op, scheme) for scheme in schemes] for op in self.graph.ops]

    def _schemed(self, op: BlockOp, scheme: str) -> tuple[str, str]:
        """Returns the types of an op's input and output on an axis where ranks have samples of their own; a piece of
        each sequence, and heads in attention; or Megatron's tensor parallelism with sequence parallelism (Korthikanti
        et al. 2022, arXiv:2205.05198)."""
        if scheme == "dp":
            return BATCH, BATCH
        if scheme == "cp":
            return (WIDTH, WIDTH) if op.kind == ATTENTION else (SEQUENCE, SEQUENCE)
        if op.kind == LINEAR:
            ends_a_branch = self.graph.ops[op.inputs[0]].kind in (ATTENTION, ACTIVATION)
            return (WIDTH, PARTIAL) if ends_a_branch else (FORKED, WIDTH)
        return (SEQUENCE, SEQUENCE) if op.kind in (NORM, ADD) else (WIDTH, WIDTH)

    def megatron(self, axes: Sequence[int]) -> TargetTypes:
        """Returns Megatron's layouts on some axes of the mesh, and batches on the others."""
        return self.schemed(["tp" if k in axes else "dp" for k in range(len(self.mesh.sizes))])

    def followed(self, solution: Solution) -> list[tuple[str, list[str]]]:
        """Returns for each axis which of "dp", "cp" and "tp" most of its ops are laid out by, and those that are
        not."""
        followed = []
        for axis in range(len(self.mesh.sizes)):
            others = {
                scheme: [
                    op.name
                    for op, s in zip(self.graph.ops, self.chosen(solution), strict=True)
                    if (s.input[axis], s.output[axis]) != self._schemed(op, scheme)
                ]
                for scheme in SCHEMES
            }
            followed.append(min(others.items(), key=lambda item: len(item[1])))
        return followed

    def split(self, solution: Solution) -> split.Split | None:
        """Returns the split of ranks under which the library runs a solution; None where it runs none such."""
        followed = self.followed(solution)
        if any(others for _, others in followed):
            return None
        axes = list(zip(self.mesh.sizes, followed, strict=True))
        dp, cp, tp = (math.prod(n for n, (name, _) in axes if name == scheme) for scheme in SCHEMES)
        return split.Split(dp, tp, cp=cp, cp_kind="heads")

    def starts(self) -> list[Pick]:
        """Returns the picks nearest to uniform layouts, and to Megatron's on each axis and on all."""
        axes = range(len(self.mesh.sizes))
        kinds = [kind for kind in TYPES if kind not in (FORKED, PARTIAL)]
        targets = [self.uniform(layout) for layout in itertools.product(kinds, repeat=len(axes))]
        targets += [self.megatron([k]) for k in axes] + [self.megatron(axes)]
        return list(dict.fromkeys(map(self.nearest, targets)))


def _matches(strategy: Strategy, types: Sequence[tuple[str, str]]) -> int:
    return sum((s.input == a) + (s.output == b) for s, (a, b) in zip(strategy.signatures, types))
