"""Experts of generation's forward pass on a CPU: every rank has all rows and chooses for all of them, and its own
experts' outputs, and those of its columns of a shared one, are a part of one sum over the ranks."""

import torch
from torch import Tensor

from ...kernels.experts.records import ExpertOrder
from ...kernels.experts.router import router_fwd
from ...kernels.gemm.activation import ACTIVATIONS
from ...kernels.gemm.prepared import Map, Plain
from ...kernels.runtime.op import acc_dtype
from ...layers.module import local
from ...layers.moe import ParallelMoE
from ...sequence_parallel.shared_expert import GATE


class DirectExperts:
    """n [m, D] -> the weighted outputs of this rank's experts, added, [m, D].

    An expert gets a copy of its weights in the order that ``form`` reads once it has had rows so often that this pays:
    of many experts most are seldom chosen.
    """

    def __init__(self, moe: ParallelMoE, form: Plain):
        router, self.fc1, self.fc2 = (local(moe.shard(name)) for name in ("router", "fc1", "fc2"))
        self.bias = moe.choice_bias
        self.router, self.routing, self.first = router.to(acc_dtype(router)), moe.routing, moe.tp.rank * len(self.fc1)
        gated = ACTIVATIONS[moe.activation].gated
        assert gated is not None
        self.activation, self.form, self.pays = gated, form, form.pays
        self.maps: dict[int, tuple[Map, Map]] = {}
        self.calls = [0] * len(self.fc1)
        self.shared = self.gate = None
        if moe.shape.shared_size is not None:
            fc1, fc2 = (local(moe.shard(name)) for name in ("shared_fc1", "shared_fc2"))
            self.shared = form.mlp(fc1, None, gated), form.partial(fc2)
        if moe.shape.shared_gate:
            self.gate = local(moe.shard("shared_gate")).to(self.router.dtype)

    def __call__(self, n: Tensor) -> Tensor:
        weights, chosen, _ = router_fwd(n, self.router, self.bias, self.routing)
        y, last = self._of_shared(n, weights.dtype), self.first + len(self.fc1)
        if len(n) == 1:
            for number, weight in zip(chosen[0].tolist(), weights[0].tolist(), strict=True):
                if self.first <= number < last:
                    y.add_(self._output(number - self.first, n), alpha=weight)
            return y.to(n.dtype)
        order, k = ExpertOrder.of(chosen, len(self.router)), self.routing.k
        bounds = order.offsets.tolist()
        sizes = {e: bounds[e + 1] - bounds[e] for e in range(self.first, last) if bounds[e] < bounds[e + 1]}
        if sizes:
            numbers = order.numbers[bounds[self.first] : bounds[last]]
            rows = numbers // k
            pieces = zip(sizes, n.index_select(0, rows).split([*sizes.values()]), strict=True)
            outputs = torch.cat([self._output(number - self.first, x) for number, x in pieces])
            y.index_add_(0, rows, outputs * weights.flatten()[numbers, None])
        return y.to(n.dtype)

    def _of_shared(self, n: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns this rank's part of the shared expert's output, to which the others' are added; 0 without one."""
        if self.shared is None:
            return n.new_zeros(n.shape, dtype=dtype)
        up, down = self.shared
        y = down(up(n)).to(dtype)
        return y if self.gate is None else y.mul_(router_fwd(n, self.gate, None, GATE)[0])

    def _output(self, expert: int, x: Tensor) -> Tensor:
        """x [r, D] -> fc2 (act(gate) up) [r, D]"""
        if expert not in self.maps or self.calls[expert] == self.pays:
            self.maps[expert] = self._mlp_maps(expert)
        self.calls[expert] += 1
        up, down = self.maps[expert]
        return down(up(x))

    def _mlp_maps(self, expert: int) -> tuple[Map, Map]:
        form = self.form if self.pays is None or self.calls[expert] == self.pays else Plain()
        return form.mlp(self.fc1[expert], None, self.activation), form.partial(self.fc2[expert])
