"""A mixture of experts, its experts divided among the ranks.

x [m, D] -> router: k experts and weights a row -> rows to their ranks -> gated MLPs -> parts [k, m, D] -> sum [m, D]
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..collectives import collect, copy, split
from ..kernels.experts import alone
from ..kernels.experts.records import Routing, check_routing
from ..kernels.gemm.activation import ACTIVATIONS, GATED
from ..kernels.norm import Recompute, reduce_bias_dropout_add_norm
from ..kernels.runtime.errors import check
from ..kernels.runtime.op import acc_dtype
from ..kernels.runtime.rules import boolean, check_rules, integer, optional
from ..parallel import TensorParallel
from ..sequence_parallel import routed_experts
from ..sequence_parallel.experts import NO_ADAPTERS, RoutedParts
from ..sequence_parallel.shared_expert import SharedParts, SharedWeights
from .balance import in_a_sequence, router_sums
from .call import CALL, Call
from .expert_ranks import ExpertGroup, expert_ranks
from .linear import Adaptable
from .module import check_width, local, on_pieces
from .shapes import INIT, Init, MoEShape, check_shared

_RULES = dict.fromkeys(("hidden_size", "ffn_size", "num_experts"), integer()) | dict(
    shared_size=optional(integer()), shared_gate=boolean
)


def _behind_a_graph(
    layer: "ParallelMoE", n: Tensor, recompute: Recompute | None, call: Call
) -> tuple[Tensor, RoutedParts, int]:
    """Returns the layer's results outside of a graph of torch.compile, which ends here, and another begins: on several
    ranks the host counts the rows that arrive."""
    return layer._run_at_once(n, recompute, call)


def _prepare_graphs() -> None:
    """Takes :func:`_behind_a_graph` out of graphs, which imports the compiler; no graph can do it itself."""
    global _behind_a_graph
    if not hasattr(_behind_a_graph, "_torchdynamo_disable"):
        _behind_a_graph = torch.compiler.disable(_behind_a_graph)


class ParallelMoE(Adaptable):
    """Sums w_j expert_j(x) over the k experts that a router chooses for a row; no row is dropped.

    An expert is fc2 (act(gate) up) with (gate, up) = fc1 x: ``fc1`` [E, F, 2, D], gate and up side by side, and ``fc2``
    [E, D, F] hold all E = ``num_experts``, of which each rank has E / R; ``router`` [E, D] is on every rank.
    ``routing``: a :class:`tpfuse.kernels.Routing`.  ``activation``: the gate's, one that has a gated form.  With
    ``routing.biased`` the scores that decide the choice have a ``router_bias`` [E], fp32 and 0 at first, which
    :func:`tpfuse.balance_experts` sets, not an optimizer; a forward pass in training mode counts the rows that every
    expert has for it.

    ``shared_size``: the width S of an expert that every row has beside those k, ``shared_fc1`` [S, 2, D] and
    ``shared_fc2`` [D, S], split over ``tp`` as an MLP is.  ``shared_gate``: its output is multiplied by the sigmoid of
    the row times ``shared_gate`` [1, D], as Qwen2-MoE has it (without: DeepSeek-V3, arXiv:2412.19437).

    Outputs and gradients of x and of the experts have the same bits at every R, with sequence parallelism and without;
    the router's gradient, a sum over ranks in fp32, agrees to rounding, and with ``tp.bitwise`` has the same bits too.
    (On CPUs with the same number of threads; on a GPU by tiles of one size.)  Without sequence parallelism a rank takes
    its share of the rows and the results are collected, rounded once more than with it (with ``tp.bitwise`` alike).
    With a shared expert, whose output is a sum over ranks, outputs and gradients of x and of its weights agree to
    rounding, and with ``tp.bitwise`` have the same bits.

    ``experts``: mesh["dp", "tp"], over whose ranks the experts are divided in place of those of ``tp``, so that R is
    their number; rows of all replicas travel over them, and every replica makes the same calls, of as many rows as it
    has.  Gradients of experts are complete after backward(): sums over all replicas' rows, divided by the number of
    replicas, the mean that replicas take of the others.

    ValueError for sizes that cannot be divided, a routing or activation that cannot be used, and other ``experts``.
    """

    repr_fields = "num_experts", "routing", "activation"
    in_one = False  # the block takes its steps one by one
    has_router = True
    load: Tensor | None = None  # int64 [E], rows that chose each expert on this rank since balance_experts; no buffer
    out_bias = None

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        routing: Routing,
        *,
        tp: TensorParallel | None = None,
        experts: ExpertGroup | None = None,
        activation: str = "silu",
        shared_size: int | None = None,
        shared_gate: bool = False,
        init_std: float = 0.02,
        out_init_std: float | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(tp)
        self.experts = expert_ranks("ParallelMoE", experts, self.tp)
        shape = MoEShape(
            hidden_size, ffn_size, num_experts, routing, activation=activation, shared_size=shared_size,
            shared_gate=shared_gate,
        )  # fmt: skip
        self._build(shape, Init(init_std, out_init_std, dtype, device))

    @classmethod
    def of(
        cls,
        shape: MoEShape,
        *,
        tp: TensorParallel | None = None,
        experts: TensorParallel | None = None,
        init: Init = INIT,
    ) -> "ParallelMoE":
        """Returns the layer of a shape, for a block that compares its calls itself."""
        layer = cls.__new__(cls)
        Adaptable.__init__(layer, tp)
        layer.experts = layer.tp if experts is None else experts
        layer._build(shape, init)
        return layer

    def _build(self, shape: MoEShape, init: Init) -> None:
        name, (D, width, E, routing, activation, S, gated) = "ParallelMoE", shape
        check_rules(name, shape._asdict(), _RULES)
        check_shared(name, S, shared_gate=gated, num_experts=E)
        check_routing(name, routing, E)
        gates = GATED.values()
        check(activation in gates, f"{name}: a gated activation must be one of {', '.join(gates)}, got {activation!r}")
        self.experts.divide(E, f"{name}: num_experts")
        self.shape, self.width, self.num_experts = shape, D, E
        self.routing, self.activation = routing, activation
        dtype, device = init.dtype, init.device
        self.add_parameter("router", (E, D), None, init.std, dtype=dtype, device=device)
        self.add_parameter("fc1", (E, width, 2, D), 0, init.std, dtype=dtype, device=device)
        self.add_parameter("fc2", (E, D, width), 0, init.output_std, dtype=dtype, device=device)
        if routing.biased:
            bias_dtype = torch.promote_types(local(self.shard("router")).dtype, torch.float32)
            self.add_parameter("router_bias", (E,), None, "zeros", dtype=bias_dtype, device=device)
            self.router_bias.requires_grad_(False)
        if S is not None:
            self.tp.divide_leaves(S, f"{name}: shared_size")
            self.add_parameter("shared_fc1", (S, 2, D), 0, init.std, dtype=dtype, device=device)
            self.add_parameter("shared_fc2", (D, S), 1, init.output_std, dtype=dtype, device=device)
        if gated:
            self.add_parameter("shared_gate", (1, D), None, init.std, dtype=dtype, device=device)
        if self.experts.size > 1:
            _prepare_graphs()
        if not self.fc2.is_meta:  # a model compares its config
            self.experts.agree(name, {field: str(value) for field, value in shape._asdict().items()})
        self.initialize_alone()

    def _apply(self, fn: Any, recurse: bool = True) -> "ParallelMoE":
        """Moves the layer, as Module.to does; a ``router_bias`` stays fp32 at least, or the steps of
        :func:`tpfuse.balance_experts` would be rounded away."""
        name = "router_bias"
        bias = self.shard(name).detach() if self.routing.biased else None
        super()._apply(fn, recurse)
        if bias is not None and (cast := self.shard(name)).dtype.itemsize < bias.dtype.itemsize:
            cast.data = bias.to(cast.device, acc_dtype(cast))
        return self

    def ranks_of(self, name: str) -> TensorParallel:
        return self.experts if name in ("fc1", "fc2") else self.tp

    @property
    def copies(self) -> int:
        """The number of gradients of n that come back unsummed: of k experts, the router and the shared expert."""
        return 1 if self._rows_are_whole else self.routing.k + 1 + self._shared_parts.gradients

    @property
    def _shared_parts(self) -> SharedParts:
        shape = self.shape
        return SharedParts() if shape.shared_size is None else SharedParts.of(self.tp, gated=shape.shared_gate)

    @property
    def _rows_are_whole(self) -> bool:
        """True if every rank of several has all rows."""
        return self.tp.size > self.tp.row_shards

    def parts(self, n: Tensor, recompute: Recompute | None = None, call: Call = CALL) -> Tensor:
        """n [m, D] or expanded [copies, m, D] -> parts [k, m, D], to be summed over k, with a shared expert some more
        (without sequence parallelism to their sum, [1, M, D]).

        ``recompute``: n is recomputed in backward, and rows are sent again unless ``call.keep``.  Rows beyond
        ``call.seq * call.batch`` are padding, which no expert sees.
        """
        return self._run(n, recompute, call)[0]

    def parts_and_sums(self, n: Tensor, recompute: Recompute | None = None, call: Call = CALL) -> tuple[Tensor, Tensor]:
        """Returns :meth:`parts` and the router's sums, [N, 2 E + 2] of this rank's rows (balance.py)."""
        parts, routed, m = self._run(n, recompute, call)
        return parts, router_sums(routed.logits, routed.chosen, self.routing.score, call, m=m, tp=self.tp)

    def _run(self, n: Tensor, recompute: Recompute | None, call: Call) -> tuple[Tensor, RoutedParts, int]:
        """Returns the parts, the results of this rank's rows, and their number."""
        if self.experts.size > 1 and torch.compiler.is_compiling():
            return _behind_a_graph(self, n, recompute, call)
        return self._run_at_once(n, recompute, call)

    def _run_at_once(self, n: Tensor, recompute: Recompute | None, call: Call) -> tuple[Tensor, RoutedParts, int]:
        if not self._rows_are_whole:
            routed = self._routed(n, n.shape[-2] * self.tp.size, recompute, call)
            return routed.parts, routed, n.shape[-2]
        x = n[0] if n.dim() == 3 else n
        M = x.shape[0]
        mine = split(F.pad(x, (0, 0, 0, -M % self.tp.all_leaves)), self.tp)
        routed = self._routed(mine, M, None, call)
        y = reduce_bias_dropout_add_norm(routed.parts, leaves=self.tp.leaves)[0]
        return collect(y, self.tp, size=len(y) * self.tp.size)[None, :M], routed, mine.shape[0]

    def _routed(self, n: Tensor, rows: int, recompute: Recompute | None, call: Call) -> RoutedParts:
        """Returns the results of this rank's n; ``rows``: the number of all ranks' rows, the last of which may be
        padding."""
        m, tp = n.shape[-2], self.tp
        valid = call.valid_rows(rows, tp)
        adapter: Any = self.adapter
        fc1, fc2 = (on_pieces(self.shard(name), tp) for name in ("fc1", "fc2"))
        router = copy(on_pieces(self._router().to(acc_dtype(n)), tp), tp)  # gradients of all ranks' rows are summed
        routed = routed_experts(
            n, fc1, fc2, router, router_bias=self.choice_bias,
            routing=self.routing, activation=self.activation, tp=tp, experts=self.experts, shared=self._shared(),
            valid=max(0, min(m, valid - tp.rank * m)), recompute=recompute, keep=call.keep,
            adapters=NO_ADAPTERS if adapter is None else adapter.pairs(),
        )  # fmt: skip
        self._count(routed.chosen, call, m)
        return routed

    def _router(self) -> Tensor:
        """Returns the router's weight, and behind it that of the shared expert's gate."""
        router = local(self.shard("router"))
        return torch.cat((router, local(self.shard("shared_gate")))) if self.shape.shared_gate else router

    def _shared(self) -> SharedWeights | None:
        if self.shape.shared_size is None:
            return None
        fc1, fc2 = (on_pieces(self.shard(name), self.tp) for name in ("shared_fc1", "shared_fc2"))
        return SharedWeights(fc1, fc2, gated=self.shape.shared_gate)

    @property
    def choice_bias(self) -> Tensor | None:
        """What is added to a row's scores for the choice, [E]; None: nothing."""
        return local(self.shard("router_bias")) if self.routing.biased else None

    def _count(self, chosen: Tensor, call: Call, m: int) -> None:
        """Counts each expert's rows among this rank's m, once: a pass that backward makes again counts nothing, as do
        rows of no sequence."""
        again = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        if self.routing.biased and self.training and not again:
            counted = in_a_sequence(call, m, valid=chosen.shape[0], tp=self.tp, device=chosen.device).long()
            load = torch.zeros(self.num_experts, dtype=torch.int64, device=chosen.device)
            load.index_add_(0, chosen.flatten().long(), counted[:, None].expand_as(chosen).flatten())
            self.load = load if self.load is None else self.load.to(load.device) + load

    def _alone(self, x: Tensor) -> Tensor | None:
        """Returns the output by fewer calls where one process has all experts, no gradient is recorded and nothing else
        is asked; None elsewhere."""
        fc1, fc2, router = (self.shard(name) for name in ("fc1", "fc2", "router"))
        tp, counts = self.tp, self.routing.biased and self.training
        more = tp.bitwise is not None or tp.row_tile or self.shape.shared_size is not None or self.adapter is not None
        if self.experts.size > 1 or more or counts or not alone.applies(x, fc1, fc2):
            return None
        rows, gated = x.reshape(-1, self.width), ACTIVATIONS[self.activation].gated
        assert gated is not None
        y = alone.expert_outputs(
            rows, router.to(acc_dtype(x)), self.choice_bias,
            fc1=fc1, fc2=fc2, routing=self.routing, activation=gated,
        )  # fmt: skip
        return y.view(x.shape)

    def forward(
        self, x: Tensor, *, batch: int = 1, router_sums: bool = False, call: Call | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x [..., D], all dimensions but the last rows (this rank's; without sequence parallelism all) -> [..., D].

        ``router_sums``: beside it come sums for :func:`tpfuse.layers.balance_loss`, of each of ``batch`` sequences,
        whose rows are s * batch + b.  ``call`` is a block's, which calls all branches alike.  ValueError for another
        width.
        """
        check_width("ParallelMoE", x, self.width)
        if call is None and not router_sums and (y := self._alone(x)) is not None:
            return y
        call = Call(batch, router_sums=router_sums) if call is None else call
        rows, leaves = x.reshape(-1, self.width), 0 if self._rows_are_whole else self.tp.row_leaves
        summed = lambda parts: reduce_bias_dropout_add_norm(parts, leaves=leaves)[0].view(x.shape)
        if not call.router_sums:
            return summed(self.parts(rows, call=call))
        parts, sums = self.parts_and_sums(rows, call=call)
        return summed(parts), sums
