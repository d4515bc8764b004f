"""One training step (forward + backward) of a stack of pre-norm blocks, on two CPU processes: tpfuse against its peers.

    python -m bench.models.train_step         blocks of GPT-2 and Llama, fp32 and bf16, attention dropout 0 and 0.1
    python -m bench.models.train_step --kind llama --dtype bf16 --rounds 40 --json bench/results/train_step.json

All providers run in the same processes, on the same weights, batch and threads, one step each in a round and in another
order in each, so that what slows the machine down, or a provider leaves in memory, meets all of them; a row gives the
median of the *ratios* of the steps of a round, and their quartiles.  Outputs are compared first, with dropout off.
"one process" is rank 0 alone with the whole model on as many threads as there are ranks.
"""

import argparse
import ctypes
import gc
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from bench import machine, measured
from bench._parser import parser_of
from bench._resident import resident
from bench.models.peers import EPS, KINDS, THETA, Block, Kind, Stack, dtensor_block, dtensor_norm, megatron_block
from tpfuse import TensorParallel
from tpfuse.kernels import rope_table
from tpfuse.kernels.norm import norm_in
from tpfuse.kernels.runtime.philox import make_rng
from tpfuse.layers import LayerNorm, Normed, RMSNorm, TransformerBlock
from tpfuse.layers.call import Rope
from tpfuse.layers.module import replicated
from tpfuse.layers.shards import named_specs
from tpfuse.tools.ledger import saved_bytes
from tpfuse.tools.ledger.processes import on_ranks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def arguments() -> argparse.Namespace:
    parser = parser_of("bench.models.train_step", __doc__)
    parser.add_argument("--kind", choices=KINDS, action="append", help="of the blocks (default: both)")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: both")
    parser.add_argument("--attention-dropout", type=float, action="append", help="default: 0 and 0.1")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each provider (default 20)")
    parser.add_argument("--tp", type=int, default=2, help="processes (default 2)")
    for name, value in dict(width=768, heads=12, seq=512, batch=4, layers=2).items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--dropout", type=float, default=0.1, help="after attention and MLP (default 0.1)")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    args = parser.parse_args()
    args.kind, args.dtype = args.kind or list(KINDS), args.dtype or list(DTYPES)
    args.attention_dropout = args.attention_dropout or [0.0, 0.1]
    return args


# ---- providers: build(...) -> (forward of x, x, gradient of the output) on this rank ----


def full_weights(args, kind: Kind, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """One layer's weights as every provider gets them."""
    gen, D, ffn = torch.Generator().manual_seed(0), args.width, kind.ffn(args.width)
    normal = lambda *shape, std: (torch.randn(*shape, generator=gen) * std).to(dtype)
    shapes = {"qkv": (3 * D, D), "out": (D, D), "fc1": (ffn * (1 + kind.gated), D), "fc2": (D, ffn)}
    layers = []
    for _ in range(args.layers):
        layer = {f"{n}.weight": normal(*s, std=0.02) for n, s in shapes.items()}
        if kind.bias:
            layer |= {f"{n}.bias": normal(s[0], std=0.02) for n, s in shapes.items()}
        for n in ("norm1", "norm2"):
            layer |= {f"{n}.weight": 1 + normal(D, std=0.1)}
            if kind.bias:
                layer |= {f"{n}.bias": normal(D, std=0.1)}
        layers.append(layer)
    return layers


class OurStack(torch.nn.Module):
    """The form a model uses: an entering norm, then blocks that pass (h, normed) on; the last norm is the final one."""

    def __init__(
        self, args, tp: TensorParallel, dtype: torch.dtype, attention_dropout: float, saving: str,
        kind: Kind = KINDS["gpt2"],
    ):  # fmt: skip
        super().__init__()
        self.args, self.tp, self.saving, self.kind, self.count = args, tp, saving, kind, 0
        options = dict(
            tp=tp, dropout=args.dropout, attention_dropout=attention_dropout, saving=saving, place="inner", dtype=dtype,
            norm="layer" if kind.bias else "rms", bias=kind.bias, norm_bias=kind.bias, gated=kind.gated,
            activation="silu" if kind.gated else "gelu_tanh", eps=EPS,
        )  # fmt: skip
        self.rope = Rope(*rope_table(args.width // args.heads, args.seq, theta=THETA)) if kind.rotary else None
        self.input_norm = (LayerNorm if kind.bias else RMSNorm)(args.width, eps=EPS, tp=tp, dtype=dtype)
        self.blocks = torch.nn.ModuleList(
            TransformerBlock(args.width, args.heads, kind.ffn(args.width), layer=i, **options)
            for i in range(args.layers)
        )

    def load(self, layers: list[dict[str, Tensor]]) -> None:
        D, H = self.args.width, self.args.heads
        peers = {
            "attention.out": "out",
            "mlp.fc1": "fc1",
            "mlp.fc2": "fc2",
            "attention.qkv": "qkv",
            "attention_norm": "norm2",
        }
        for name, p, spec, tp in named_specs(self):
            path, leaf = name.rsplit(".", 1)
            if path == "input_norm" or path.endswith(
                "mlp_norm"
            ):  # the first norm of the next block, or the final one, which is 1 and 0
                index = 0 if path == "input_norm" else int(path.split(".")[1]) + 1
                if index < len(layers):
                    p.data.copy_(layers[index][f"norm1.{leaf}"])
                continue
            _, layer, module = path.split(".", 2)
            full = layers[int(layer)][f"{peers[module]}.{leaf}"]
            if module == "attention.qkv":  # rows q, k, v of all heads -> [H, 3, E, ...]
                full = full.view(3, H, D // H, *full.shape[1:]).transpose(0, 1)
            if module == "mlp.fc1" and self.kind.gated:  # rows gate, up of all -> [F, 2, D]
                full = full.view(2, -1, D).transpose(0, 1)
            p.data.copy_(full.reshape(spec.shape)[spec.local(tp)])

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        rng = make_rng(1, self.count)
        weight, bias = replicated(self.tp, self.input_norm.weight, self.input_norm.bias)
        shape = dict(ranks=self.tp.row_shards, recompute=self.saving == "smallest")
        h, *normed = norm_in(x, weight, bias, eps=EPS, norm=self.input_norm.kind, **shape)
        normed = Normed(*normed)
        for block in self.blocks:
            h, normed = block(h, normed, batch=self.args.batch, rng=rng, rope=self.rope)
        return normed.n  # [R, m, D], as a head would take it; its gradient comes as R parts


def providers(
    args, kind: Kind, dtype: torch.dtype, attention_dropout: float, *, rank: int, mesh
) -> dict[str, tuple[torch.nn.Module, Tensor, Tensor]]:
    """name -> (module, x, dy), each in the provider's own layout; no module on ranks that only wait."""
    layers = full_weights(args, kind, dtype)
    gen, R = torch.Generator().manual_seed(1), args.tp
    x, dy = (torch.randn(args.batch, args.seq, args.width, generator=gen).to(dtype) for _ in range(2))
    shard = lambda t, dim: t.chunk(R, dim)[rank].contiguous()
    rows = lambda t: shard(t.transpose(0, 1).reshape(-1, args.width), 0)
    models = {}
    for saving in ("fastest", "smallest"):
        stack = OurStack(args, TensorParallel(mesh, sequence_parallel=True), dtype, attention_dropout, saving, kind)
        stack.load(layers)
        models[f"tpfuse {saving}"] = (
            stack,
            rows(x),
            torch.stack([rows(dy), *(torch.zeros_like(rows(dy)) for _ in range(R - 1))]),
        )

    new_block = lambda: Block(args.width, args.heads, args.dropout, attention_dropout, kind).to(dtype)
    new_norm = lambda: kind.norm(args.width, eps=EPS).to(dtype)

    def plain(wrap: Callable = lambda block: block, wrap_norm: Callable = lambda norm: norm) -> Stack:
        blocks = [new_block() for _ in layers]
        for block, layer in zip(blocks, layers, strict=True):
            block.load(layer)
        return Stack([wrap(block) for block in blocks], wrap_norm(new_norm()))

    models["DTensor TP+SP"] = (
        plain(lambda b: dtensor_block(b, mesh), lambda n: dtensor_norm(n, mesh)),
        shard(x, 1),
        shard(dy, 1),
    )
    try:
        blocks = [megatron_block(new_block(), rank, R, dtype) for _ in layers]
        for block, layer in zip(blocks, layers, strict=True):
            block.load(layer)
        models["megatron-core TP"] = Stack(blocks, new_norm()), x.clone(), dy
    except ImportError:
        if rank == 0:
            print("megatron-core is not installed (pip install --no-deps megatron-core): left out", file=sys.stderr)
    models["one process"] = plain() if rank == 0 else None, x.clone(), dy
    return models


# ---- measurement ----


def step(module: torch.nn.Module | None, x: Tensor, dy: Tensor, threads: int) -> float:
    """Seconds of a forward + backward, from a common start; the slowest rank counts."""
    dist.barrier()
    start = time.perf_counter()
    if module is not None:
        torch.set_num_threads(threads)
        x = x.detach().requires_grad_()
        y = module(x)
        y.backward(dy)
        torch.set_num_threads(1)
        for p in module.parameters():
            p.grad = None
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def kept_bytes(module: torch.nn.Module, x: Tensor) -> int:
    """Returns the bytes that a forward keeps for backward."""
    with saved_bytes(module) as saved:
        module(x.detach().requires_grad_())
    return saved()


def peak_rss(module: torch.nn.Module | None, x: Tensor, dy: Tensor, threads: int) -> float:
    """Returns the MiB by which the largest rank's resident memory grows during a step, gradients included.

    nan where /proc does not tell.
    """
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what earlier steps freed goes back, or it would be used unseen
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        start = resident("VmRSS")
        step(module, x, dy, threads)
        grown = (resident("VmHWM") - start) / 2**20
    except (OSError, AttributeError):
        step(module, x, dy, threads)
        grown = float("nan")
    largest = torch.tensor(grown)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def compare(args, models: dict, rank: int) -> dict[str, float]:
    """Largest difference of each output from the one-process one, over its largest value; dropout off."""
    outputs = {}
    for name, (module, x, _) in models.items():
        if module is None:
            continue
        module.eval()
        y = module(x).detach()
        module.train()
        if name.startswith("tpfuse"):
            y = _gather(y[0], 0).view(args.seq, args.batch, -1).transpose(0, 1)
        elif name.startswith("DTensor"):
            y = _gather(y.transpose(0, 1).contiguous(), 0).transpose(0, 1)
        outputs[name] = y.double()
    if rank:
        return {}
    truth = outputs["one process"]
    return {name: float((y - truth).abs().max() / truth.abs().max()) for name, y in outputs.items()}


def _gather(x: Tensor, dim: int) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts, dim)


def run(args) -> list[dict]:
    """Returns the rows, on rank 0."""
    rank, mesh, rows = dist.get_rank(), dist.device_mesh.init_device_mesh("cpu", (args.tp,)), []
    for kind, dtype, attention_dropout in itertools.product(args.kind, args.dtype, args.attention_dropout):
        torch.manual_seed(0)  # layers used alone draw their weights from torch's generator, the same on every rank
        models = providers(args, KINDS[kind], DTYPES[dtype], attention_dropout, rank=rank, mesh=mesh)
        error = compare(args, models, rank)
        saved = {name: kept_bytes(module, x) for name, (module, x, _) in models.items() if module is not None}
        times = {name: [] for name in models}
        order = random.Random(0)  # the same on every rank
        for i in range(args.rounds + 2):
            for name, (module, x, dy) in order.sample([*models.items()], len(models)):
                seconds = step(module, x, dy, args.tp if name == "one process" else 1)
                if i >= 2:
                    times[name].append(seconds)
        peak = {name: peak_rss(*parts, args.tp if name == "one process" else 1) for name, parts in models.items()}
        if rank == 0:
            case = dict(kind=kind, dtype=dtype, attention_dropout=attention_dropout)
            rows += [case | row for row in summary(args, times, saved, peak, error)]
    return rows


def summary(args, times: dict, saved: dict, peak: dict, error: dict) -> list[dict]:
    sbh = args.seq * args.batch * args.width * args.layers
    rows = []
    for name, seconds in times.items():
        ratios = [base / t for base, t in zip(times["DTensor TP+SP"], seconds, strict=True)]
        low, mid, high = statistics.quantiles(ratios, n=4)
        rows.append(
            dict(
                provider=name,
                seconds=statistics.median(seconds),
                tokens_per_s=args.seq * args.batch / statistics.median(seconds),
                speed=[low, mid, high],
                saved_sbh=saved[name] / sbh,
                saved_ratio=saved[name] / saved["DTensor TP+SP"],
                peak_rss_mib=peak[name],
                max_error=error[name],
            )
        )
    return rows


def main() -> None:
    args = arguments()
    rows = on_ranks(args.tp, run, args)
    result = dict(rows=rows, machine=machine.this_machine(), arguments=vars(args))
    print(measured.train_step([result]))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
