"""Host time of tpfuse's ops and blocks beside plain eager torch's, by a driver that starts nothing; no GPU is needed.

    python -m bench.host                     ops and blocks, forward and backward
    python -m bench.host --rounds 40 --json bench/results/host.json

What a call costs the host is Python, autograd, the dispatcher, allocations and the start of kernels; on a GPU a model
whose kernels take less than this waits for Python.  Tensors have a few rows, a GEMM of torch's is an allocation on both
sides, and kernels go through Triton's launcher to a CUDA driver that starts nothing (bench/idle).  All calls take turns
in one process; a figure is the least processor time of a call in microseconds, and ratios are of those.
"""

import json
import pathlib
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from bench import idle, machine
from bench._parser import parser_of
from bench.measured import host
from tpfuse.kernels import attention, layer_norm, linear, reduce_bias_dropout_add_norm, replay, rms_norm
from tpfuse.kernels.runtime import launch, op
from tpfuse.kernels.runtime.philox import make_rng
from tpfuse.layers import Normed, Rope, TransformerBlock

BF16 = torch.bfloat16
D, HEADS, BATCH, SEQ = 64, 4, 4, 8
CALLS_A_TURN = 40
Task = Callable[[], Any]

# what aten calls without starting a kernel
NO_KERNEL = set(
    "alias as_strided chunk contiguous detach empty empty_like empty_strided expand expand_as flatten is_neg "
    "lift_fresh narrow new_empty permute reshape resize_ resolve_conj resolve_neg result_type select slice split "
    "squeeze t to transpose unbind unflatten unsqueeze view view_as _reshape_alias _unsafe_view".split()
)


class PlainBert(nn.Module):
    """The post-norm block that a user of torch writes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.fc1, self.fc2 = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(BATCH, SEQ, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(BATCH, SEQ, D)
        x = self.norm1(x + F.dropout(self.out(o), 0.1))
        return self.norm2(x + F.dropout(self.fc2(F.gelu(self.fc1(x))), 0.1))


class PlainLlama(nn.Module):
    """The pre-norm block with rotary positions and a gated MLP that a user of torch writes."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.gate, self.up, self.down = (nn.Linear(*s, bias=False) for s in ((D, 4 * D), (D, 4 * D), (4 * D, D)))
        self.norm1, self.norm2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.cos, self.sin = (torch.cat([t, t], 1).to(BF16) for t in (cos, sin))

    def _rotated(self, x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * self.cos + torch.cat([-high, low], -1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(BATCH, SEQ, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        o = F.scaled_dot_product_attention(self._rotated(q), self._rotated(k), v, is_causal=True)
        x = x + self.out(o.transpose(1, 2).reshape(BATCH, SEQ, D))
        n = self.norm2(x)
        return x + self.down(F.silu(self.gate(n)) * self.up(n))


def random(*shape: int) -> Tensor:
    return torch.randn(*shape).to(BF16).requires_grad_()


def backward(forward: Task, inputs: list[Tensor]) -> Task:
    output = forward()
    tensors = [y for y in (output if isinstance(output, tuple) else (output,)) if isinstance(y, Tensor)]
    outputs = [y for y in tensors if y.requires_grad]
    gradients = [torch.ones_like(y) for y in outputs]
    return lambda: torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)


def pairs() -> dict[str, tuple[Task, Task]]:
    """Name -> (forward, backward); "torch: .." stands beside the one of tpfuse by the same name."""
    rng, rows = make_rng(0, 1), BATCH * SEQ
    cos, sin = torch.randn(2, SEQ, D // HEADS // 2).unbind(0)
    x, parts, residual, (weight, bias, extra) = (
        random(rows, D),
        random(1, rows, D),
        random(rows, D),
        random(3, D).unbind(0),
    )
    w, qkv, n = random(D, D), random(rows, HEADS, 3, D // HEADS), random(1, rows, D)
    weight, bias, extra = (v.detach().requires_grad_() for v in (weight, bias, extra))
    bert = TransformerBlock(
        D, HEADS, causal=False, activation="gelu", wiring="post", dropout=0.1, attention_dropout=0.1
    )
    llama = TransformerBlock(D, HEADS, norm="rms", gated=True, activation="silu", bias=False, place="inner")
    bert, llama, rope = bert.to(BF16), llama.to(BF16), Rope(cos, sin)
    plain_bert, plain_llama, batched = PlainBert().to(BF16), PlainLlama(cos, sin).to(BF16), random(BATCH, SEQ, D)

    def block() -> tuple[Tensor, Tensor]:
        h, normed = llama(x, Normed(n), batch=BATCH, rope=rope)
        return h, normed.n

    fused = lambda: reduce_bias_dropout_add_norm(parts, bias, residual, weight, extra, p=0.1, rng=rng)[:2]
    unfused = lambda: F.layer_norm(residual + F.dropout(x + bias, 0.1), (D,), weight, extra)
    tasks: dict[str, tuple[Task, list[Tensor]]] = {
        "bias, dropout, residual, norm": (fused, [parts, bias, residual, weight, extra]),
        "torch: bias, dropout, residual, norm": (unfused, [x, bias, residual, weight, extra]),
        "layer_norm": (lambda: layer_norm(x, weight, bias), [x, weight, bias]),
        "torch: layer_norm": (lambda: F.layer_norm(x, (D,), weight, bias), [x, weight, bias]),
        "rms_norm": (lambda: rms_norm(x, weight), [x, weight]),
        "torch: rms_norm": (lambda: F.rms_norm(x, (D,), weight), [x, weight]),
        "linear, gelu": (lambda: linear(x, w, bias, "gelu"), [x, w, bias]),
        "torch: linear, gelu": (lambda: F.gelu(F.linear(x, w, bias)), [x, w, bias]),
        "attention, dropout": (lambda: attention(qkv, batch=BATCH, causal=True, p=0.1, rng=rng), [qkv]),
        "BERT block": (lambda: bert(x, batch=BATCH, rng=rng), [x, *bert.parameters()]),
        "torch: BERT block": (lambda: plain_bert(batched), [batched, *plain_bert.parameters()]),
        "Llama block": (block, [x, n, *llama.parameters()]),
        "torch: Llama block": (lambda: plain_llama(batched), [batched, *plain_llama.parameters()]),
    }
    return {name: (forward, backward(forward, inputs)) for name, (forward, inputs) in tasks.items()}


def microseconds(task: Task) -> float:
    start = time.thread_time()
    for _ in range(CALLS_A_TURN):
        task()
    return (time.thread_time() - start) / CALLS_A_TURN * 1e6


def measure(rounds: int) -> list[dict[str, Any]]:
    tasks = {(name, i): task for name, both in pairs().items() for i, task in enumerate(both)}
    for task in tasks.values():
        microseconds(task)  # kernels are compiled, calls recorded
    best = dict.fromkeys(tasks, float("inf"))
    for _ in range(rounds):
        for key, task in tasks.items():
            best[key] = min(best[key], microseconds(task))
    rows = []
    for name in dict.fromkeys(name for name, _ in tasks):
        counts = [kernels(tasks[name, i]).total() for i in (0, 1)]
        rows.append(dict(call=name, us=[best[name, i] for i in (0, 1)], kernels=counts))
    return rows


def kernels(task: Task) -> Counter[str]:
    """Counts the kernels that a call starts, its own and torch's, by name."""
    started: Counter[str] = Counter()
    start, directly = launch._start, lambda: not torch.is_grad_enabled()  # though a profiler looks on

    def counted(kernel: Any, *args: Any, **options: Any) -> Any:
        started[kernel.fn.__name__] += 1
        return start(kernel, *args, **options)

    patches = mock.patch.object(launch, "_start", counted), mock.patch.object(replay, "REPLAY", False)
    with patches[0], patches[1], mock.patch.object(op, "eager", directly):
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            task()
    for event in profiled.events():
        inner = {child.name.removeprefix("aten::") for child in event.cpu_children if child.name.startswith("aten::")}
        name = event.name.removeprefix("aten::")
        if event.name.startswith("aten::") and name not in NO_KERNEL and inner <= NO_KERNEL:
            started[name] += 1
    return started


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("bench.host", __doc__)
    parser.add_argument("--rounds", type=int, default=25, help="turns of each call (default 25)")
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path, help="also write the results there")
    args = parser.parse_args(argv)
    idle.install()
    torch.set_num_threads(1)
    result = dict(machine=machine.this_machine(), rows=measure(args.rounds))
    print(host([result]))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
