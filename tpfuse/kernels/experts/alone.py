"""A layer of experts on one process and a CPU where no gradient is recorded: the bits of the ops, in fewer calls.

Between two tokens the weights of other experts go through the caches and push the code of ops out, so that a call of
torch or Python costs several times what it does in a loop of its own.
"""

import torch
from torch import Tensor

from ..gemm.runs import value_of
from ..replay.calls import LAUNCHED, eager, on_cpu
from ..replay.recorder import active_recorder
from ..runtime.op import sum_parts
from .products import ALIGNED, FEW, begins_a_line, halves, times_transposed
from .records import Routing
from .router import router_fwd


def applies(x: Tensor, fc1: Tensor, fc2: Tensor) -> bool:
    """Returns whether a call with rows x [.., D] and weights [E, F, 2, D] and [E, D, F] is one that nothing watches or
    records, and whose products lie in memory as the ops' own do."""
    plain = eager() and active_recorder() is None and "cpu" not in LAUNCHED and on_cpu((x, fc1, fc2))
    return plain and x.dtype == fc1.dtype == fc2.dtype and all(map(_lines, (fc1, fc2)))


def _lines(w: Tensor) -> bool:
    return w.is_contiguous() and w.data_ptr() % ALIGNED == 0 and w.shape[-1] * w.element_size() % ALIGNED == 0


def expert_outputs(
    x: Tensor, router: Tensor, bias: Tensor | None, *, fc1: Tensor, fc2: Tensor, routing: Routing, activation: str
) -> Tensor:
    """x [m, D] -> the sum over a row's k experts of its weight times fc2 (act(gate) up) [m, D], for a call that
    :func:`applies`; ``router`` [E, D] in fp32 (fp64 for fp64), ``activation`` a gated one."""
    weights, chosen, _ = router_fwd(x, router, bias, routing)
    (m, k), (E, F, _, D), numbers = chosen.shape, fc1.shape, None
    if m == 1:
        busy, shares, rows = chosen[0].tolist(), [1] * k, begins_a_line(x).expand(k, D)
    else:
        experts, numbers = torch.sort(chosen.flatten(), stable=True)
        sizes = torch.bincount(experts, minlength=E).tolist()
        busy, rows = [e for e, size in enumerate(sizes) if size], x.index_select(0, numbers // k)
        shares, weights = [sizes[e] for e in busy], weights.flatten().index_select(0, numbers)
    in_turns = max(shares, default=0) <= FEW
    z, first = x.new_empty(m * k, *((2 * F,) if in_turns else (2, F))), times_transposed if in_turns else halves
    for e, ordered, place in zip(busy, rows.split(shares), z.split(shares), strict=True):
        first(ordered, fc1[e].view(2 * F, D), place)
    y = x.new_empty(m * k, D)
    for e, ordered, place in zip(busy, value_of(z, activation).split(shares), y.split(shares), strict=True):
        times_transposed(ordered, fc2[e], place)
    y.mul_(weights.view(-1, 1))
    parts = y if numbers is None else torch.empty_like(y).index_copy_(0, numbers, y)
    return sum_parts(parts.view(m, k, D).transpose(0, 1)).to(x.dtype)
