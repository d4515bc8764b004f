"""The wiring of a transformer block, as data: its steps in order.  Everything that runs, counts, explains or plans a
block reads this table.

    Norm    n = norm(h), read by a branch                       a kernel of its own
    Branch  parts [k, m, D] = attention(n) or mlp(n)            two GEMMs, each with its message
    Join    h = h + dropout(sum_k parts_k + bias); n = norm(h)  the kernel between two GEMM pairs

h [m, D] is the residual stream, n what the next branch reads.  :func:`run` takes the steps in order and a runner, which
says how a step is computed: :class:`Fused` in training, :class:`ByParts` where hooks of torch wait for a part,
one_node.py on one rank, models/generation/direct.py for tokens on a CPU.

A step is a stretch of the block, whose ops every runner may fuse in its own way.  WATCHERS hear the name of the stretch
that begins: those who count ops say by it where an op belongs.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from ..kernels.norm import Recompute, norm_in, reduce_bias_dropout_add_norm
from ..kernels.norm.records import NormVectors
from ..sequence_parallel.crossings import expanded
from .call import Call
from .module import replicated

NEXT = "next"  # reads the n that leaves a block: the block after it, or a model's head
NORM_IN, NORM_OUT = "input_norm", "mlp_norm"  # names of the norms at a block's ends, which are those of its parameters


class Norm(NamedTuple):
    """n = norm(h) for the branch ``to``; the residual stream stays h."""

    norm: str
    to: str

    @property
    def stretch(self) -> str:
        return f"before {self.to}"


class Branch(NamedTuple):
    """n -> parts [k, m, D], by the block's module of this name: k outputs of this rank's rows, not yet summed."""

    name: str

    @property
    def stretch(self) -> str:
        return self.name


class Join(NamedTuple):
    """h' = h + dropout(sum of the parts + bias), n = norm(h') for ``to``; None: no branch reads n.

    Without ``norm`` n is h'.  ``branch_norm`` norms the sum before it is added to h.  ``stream``: n goes on as the
    residual stream too, as in post-norm.
    """

    branch: str
    norm: str | None = None
    to: str | None = NEXT
    branch_norm: str | None = None
    stream: bool = False

    @property
    def stretch(self) -> str:
        return f"after {self.branch}"


VECTORS = "vectors"  # the stretch in front of the steps: the vectors of all of them [D] as one message
WATCHERS: list[Callable[[str], None]] = []  # each hears the stretch that begins, and "" where the block ends


def begin(stretch: str) -> None:
    """Tells the watchers that a stretch of a block begins."""
    for watcher in WATCHERS:
        watcher(stretch)


Step = Norm | Branch | Join
Steps = tuple[Step, ...]

# Steps of a block that stands alone, by the name of their wiring.
WIRINGS: dict[str, Steps] = {
    # GPT-2, Llama; Xiong et al. 2020, arXiv:2002.04745
    "pre": (
        Norm(NORM_IN, "attention"),
        Branch("attention"),
        Join("attention", "attention_norm", to="mlp"),
        Branch("mlp"),
        Join("mlp"),
    ),
    # BERT; Vaswani et al. 2017, arXiv:1706.03762
    "post": (
        Branch("attention"),
        Join("attention", "attention_norm", to="mlp", stream=True),
        Branch("mlp"),
        Join("mlp", NORM_OUT, stream=True),
    ),
    # Gemma 2, arXiv:2408.00118: norms before and after each branch
    "sandwich": (
        Norm(NORM_IN, "attention"),
        Branch("attention"),
        Join("attention", "attention_norm", to="mlp", branch_norm="attention_branch_norm"),
        Branch("mlp"),
        Join("mlp", branch_norm="mlp_branch_norm"),
    ),
    # OLMo 2, arXiv:2501.00656: norms after each branch only
    "branch": (
        Branch("attention"),
        Join("attention", to="mlp", branch_norm="attention_branch_norm"),
        Branch("mlp"),
        Join("mlp", branch_norm="mlp_branch_norm"),
    ),
    # GPT-NeoX, arXiv:2204.06745: both branches read norms of the same h
    "parallel": (
        Norm(NORM_IN, "attention"),
        Norm("attention_norm", "mlp"),
        Branch("attention"),
        Join("attention", to=None),
        Branch("mlp"),
        Join("mlp"),
    ),
}

ALONE, INNER, LAST = PLACES = "alone", "inner", "last"


def enters(wiring: str) -> bool:
    """True if the first branch reads a norm of h."""
    step = WIRINGS[wiring][0]
    return isinstance(step, Norm) and step.norm == NORM_IN


def steps_at(wiring: str, place: str) -> Steps:
    """Returns the steps of a block at a place: "alone", or "inner" or "last" in a stack of blocks.

    In a stack a block owns the norm that enters the *next* block and runs it in its last kernel; the last block owns
    the final norm, also where blocks have no entering norm.
    """
    steps = WIRINGS[wiring]
    if place == ALONE:
        return steps
    *body, end = steps[enters(wiring) :]
    assert isinstance(end, Join)
    if end.norm is None and (enters(wiring) or place == LAST):
        end = end._replace(norm=NORM_OUT)
    return *body, end


def without_last_norm(steps: Steps) -> Steps:
    """Returns the steps of a block whose h is sent to another pipeline stage, which runs the last norm."""
    *body, end = steps
    assert isinstance(end, Join)
    return *body, end._replace(norm=None)


def first_branch(steps: Steps) -> str:
    """Returns the name of the branch that reads the n which enters the block."""
    return next(step.name for step in steps if isinstance(step, Branch))


def norm_names(steps: Steps) -> Iterator[str]:
    """Yields the names of the norms, in the order of their use."""
    for step in steps:
        names = (step.branch_norm, step.norm) if isinstance(step, Join) else (getattr(step, "norm", None),)
        yield from (name for name in names if name is not None)


class Normed(NamedTuple):
    """n [m, D] or [R, m, D] with stride 0, and how to recompute it where it is not saved.

    ``sums`` are the router's of the layers with experts so far, where a call asks for them (balance.py).
    """

    n: Tensor
    recompute: Recompute | None = None
    sums: tuple[Tensor, ...] = ()

    @property
    def rows(self) -> Tensor:
        """n [m, D]"""
        return self.n[0] if self.n.dim() == 3 else self.n


Rows = TypeVar("Rows")  # h
Read = TypeVar("Read")  # n, as a branch reads it
Parts = TypeVar("Parts")  # output of a branch


class Runner(Protocol[Rows, Read, Parts]):
    """One way to compute a block's steps."""

    def norm(self, step: Norm, h: Rows) -> tuple[Rows, Read]: ...
    def branch(self, step: Branch, n: Read) -> Parts: ...
    def join(self, step: Join, parts: Parts, h: Rows) -> tuple[Rows, Read]: ...


def run(steps: Steps, runner: Runner[Rows, Read, Parts], h: Rows, n: Read) -> tuple[Rows, Read]:
    """Runs a block's steps: h and n of the block -> those of the next.  A block alone is given h for n as well."""
    reads: dict[str | None, Read] = {first_branch(steps): n}
    parts: Any = None
    for step in steps:
        if WATCHERS:
            begin(step.stretch)
        if isinstance(step, Join):
            h, reads[step.to] = runner.join(step, parts, h)
        elif isinstance(step, Branch):
            parts = runner.branch(step, reads.pop(step.name))
        else:
            h, reads[step.to] = runner.norm(step, h)
    if WATCHERS:
        begin("")
    return h, reads[NEXT]


class BackwardRunner(Protocol):
    """The adjoints of a runner's steps, on gradients."""

    def norm(self, step: Norm, dh: Tensor, dn: Tensor) -> Tensor: ...
    def branch(self, step: Branch, dparts: Tensor) -> Tensor: ...
    def join(self, step: Join, dh: Tensor | None, dn: Tensor | None) -> tuple[Tensor, Tensor]: ...


def run_backward(
    steps: Steps, runner: BackwardRunner, dh: Tensor | None, dn: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Runs a block's steps backwards: gradients of the h and n that :func:`run` returns -> of those it takes.

    The gradient of n is None where a norm of the block has read h.
    """
    reads: dict[str | None, Any] = {NEXT: dn}
    gradient: Any = dh
    dparts: Any = None
    for step in reversed(steps):
        if WATCHERS:
            begin(step.stretch)
        if isinstance(step, Join):
            gradient, dparts = runner.join(step, gradient, reads.pop(step.to, None))
        elif isinstance(step, Branch):
            reads[step.name] = runner.branch(step, dparts)
        else:
            gradient = runner.norm(step, gradient, reads.pop(step.to))
    if WATCHERS:
        begin("")
    return gradient, reads.pop(first_branch(steps), None)


# ---- in training ----


class Fused:
    """One kernel between two GEMM pairs.  The vectors of all steps [D] (biases, norms) are one message."""

    def __init__(self, block: Any, steps: Steps, h: Tensor, call: Call):
        self.block, self.tp, self.call = block, block.tp, call
        self.p = block.dropout if block.training else 0.0
        self.first_row = call.first_row(h.shape[0], block.tp.row_rank, block.tp.row_shards, block.tp)
        if WATCHERS:
            begin(VECTORS)
        self.biases, self.norms = _replicated(block, steps)
        self.sums: tuple[Tensor, ...] = ()

    def norm(self, step: Norm, h: Tensor) -> tuple[Tensor, Normed]:
        weight, bias, eps, kind = self.norms[step.norm]
        assert weight is not None
        h, n, recompute = norm_in(
            h, weight, bias, eps=eps, norm=kind, ranks=self._copies(step.to), recompute=not self.call.keep,
            leaves=self.tp.row_leaves,
        )  # fmt: skip
        return h, Normed(n, recompute)

    def _copies(self, reader: str | None) -> int:
        """Returns how many gradients of n come back from the branch that reads it, unsummed.

        The first branch of the next block has one a shard of the rows.
        """
        return self.tp.row_shards if reader in (None, NEXT) else getattr(self.block, reader).copies

    def branch(self, step: Branch, n: Normed) -> Tensor:
        branch, recompute = getattr(self.block, step.name), None if self.call.keep else n.recompute
        if not (branch.has_router and self.call.router_sums):
            return branch.parts(n.n, recompute, self.call)
        parts, sums = branch.parts_and_sums(n.n, recompute, self.call)
        self.sums += (sums,)
        return parts

    def join(self, step: Join, parts: Tensor, h: Tensor) -> tuple[Tensor, Normed]:
        bias = self.biases[step.branch]
        if step.branch_norm is not None:
            weight, norm_bias, eps, kind = self.norms[step.branch_norm]
            parts, *_ = reduce_bias_dropout_add_norm(
                parts, bias, weight=weight, norm_bias=norm_bias, eps=eps, norm=kind, post_norm=True,
                leaves=self.tp.row_leaves,
            )  # fmt: skip
            bias = None
        weight, norm_bias, eps, kind = self.norms[step.norm]
        site = self.call.site(step.branch, self.block.layer, self.p)
        h, n, recompute = reduce_bias_dropout_add_norm(
            parts, bias, h, weight, norm_bias=norm_bias, eps=eps, norm=kind, post_norm=step.stream,
            p=self.p, rng=self.call.rng, site=site, first_row=self.first_row, batch=self.call.batch,
            ranks=self._copies(step.to), recompute=not self.call.keep, leaves=self.tp.row_leaves,
        )  # fmt: skip
        return h, Normed(n, recompute)


NO_NORM = NormVectors(eps=1e-5)  # no weight


def _replicated(block: Any, steps: Steps) -> tuple[dict[str, Tensor | None], dict[str | None, NormVectors]]:
    """Returns the branches' biases and the norms, by their names, for use on this rank's rows: one message."""
    biases = {step.branch: getattr(block, step.branch).out_bias for step in steps if isinstance(step, Join)}
    modules = {name: getattr(block, name) for name in norm_names(steps)}
    vectors = [vector for norm in modules.values() for vector in (norm.weight, norm.bias)]
    shared = iter(replicated(block.tp, *biases.values(), *vectors))
    biases = {name: next(shared) for name in biases}
    norms: dict[str | None, NormVectors] = {None: NO_NORM}
    for name, norm in modules.items():
        norms[name] = NormVectors(next(shared), next(shared), norm.eps, norm.kind)
    return biases, norms


class ByParts:
    """The block's modules one after another, each by its __call__: values to rounding, masks bitwise."""

    def __init__(self, block: Any, h: Tensor, call: Call):
        self.block, self.call = block, call
        self.p = block.dropout if block.training else 0.0
        self.first_row = call.first_row(h.shape[0], block.tp.row_rank, block.tp.row_shards, block.tp)
        self.sums: tuple[Tensor, ...] = ()

    def norm(self, step: Norm, h: Tensor) -> tuple[Tensor, Normed]:
        return h, Normed(getattr(self.block, step.norm)(h))

    def branch(self, step: Branch, n: Normed) -> Tensor:
        branch = getattr(self.block, step.name)
        if not (branch.has_router and self.call.router_sums):
            return branch(n.rows, call=self.call)
        summed, sums = branch(n.rows, call=self.call)
        self.sums += (sums,)
        return summed

    def join(self, step: Join, parts: Tensor, h: Tensor) -> tuple[Tensor, Normed]:
        x = parts
        if step.branch_norm is not None:
            x = getattr(self.block, step.branch_norm)(x).to(x.dtype)
        site = self.call.site(step.branch, self.block.layer, self.p)
        h, *_ = reduce_bias_dropout_add_norm(
            x, residual=h, p=self.p, rng=self.call.rng, site=site, first_row=self.first_row, batch=self.call.batch,
            leaves=self.block.tp.row_leaves,
        )  # fmt: skip
        n = h if step.norm is None else getattr(self.block, step.norm)(h).to(x.dtype)
        h = n if step.stream else h
        return h, Normed(expanded("TransformerBlock", n, self.block.tp) if step.to == NEXT else n)
