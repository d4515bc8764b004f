"""Messages behind GEMMs, on a link whose time is real: how much of them hides in an MLP, attention, a training step.

    python -m bench.overlap                fp32 and bf16 at 0.3, 1, 3, 10 Gbit/s and unshaped (root: network namespaces)
    python -m bench.overlap --tp 4         four ranks, unshaped
    python -m bench.overlap --json bench/results/overlap.json --plot docs/overlap.svg
    python -m bench.overlap --write        measures what ``auto`` is decided by, into tuned.json

Per part, direction and rate, seconds (median, all variants in turn in the same processes):  off, on
(overlap="pairwise"), auto, DTensor's TP + SP;  compute: the plain form whose messages are replaced by tensors that
are there already;  communication: its messages alone.

    hidden = (off - on) / min(compute, communication)        limit = on / max(compute, bytes / rate)

Unshaped is one machine, where "auto" does not overlap; so it runs, and says so, without root.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

from bench import machine
from bench._link import End, at_rates, of_ranks, unshaped
from bench._parser import parser_of
from bench.models.peers import KINDS, MLP, Attention, Block, Stack, dtensor_block, dtensor_norm
from bench.models.train_step import DTYPES, OurStack, full_weights
from tpfuse import TensorParallel
from tpfuse.kernels.runtime.tuning import TABLE, bucket
from tpfuse.layers import ParallelAttention, ParallelMLP
from tpfuse.sequence_parallel import crossings, flight

# freed memory is kept: page faults were most of the noise
KEEP = dict(MALLOC_TRIM_THRESHOLD_="4000000000", MALLOC_MMAP_THRESHOLD_="33554432")
OVERLAP = {"off": "off", "on": "pairwise", "auto": "auto"}
COLUMNS = "off", "on", "auto", "DTensor", "compute", "communication"


def arguments() -> argparse.Namespace:
    parser = parser_of("bench.overlap", __doc__)
    parser.add_argument(
        "--rate", type=float, action="append", help="Gbit/s, 0 is unshaped; default 0.3, 1, 3, 10 and 0"
    )
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: both")
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--tp", type=int, default=2, help="ranks (default 2; more run unshaped)")
    parser.add_argument("--rounds", type=int, default=20, help="runs of each variant (default 20)")
    for name, value in dict(width=768, heads=12, seq=512, batch=4, layers=2).items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    parser.add_argument("--plot", metavar="FILE", help="and draw them there")
    parser.add_argument("--write", action="store_true", help="measure rate, link and message for tuned.json instead")
    args = parser.parse_args()
    args.rate = [0.0] if args.tp != 2 else args.rate or [0.3, 1.0, 3.0, 10.0, 0.0]
    args.dtype, args.part, args.dropout = args.dtype or list(DTYPES), args.part or list(PARTS), 0.1
    return args


# ---- what is run: name -> call(), forward or forward and backward, from the same start on every rank ----


class Rig:
    """Builds every variant of one part in one dtype."""

    def __init__(self, args: argparse.Namespace, dtype: torch.dtype, mesh):
        self.args, self.dtype, self.mesh, self.rank = args, dtype, mesh, dist.get_rank()
        torch.manual_seed(0)  # layers draw their weights from torch's generator, the same on every rank
        self.rows = torch.randn(args.seq * args.batch // args.tp, args.width).to(dtype)
        self.theirs = torch.randn(args.batch, args.seq // args.tp, args.width).to(dtype)

    def tp(self, overlap: str) -> TensorParallel:
        return TensorParallel(self.mesh, sequence_parallel=True, overlap=overlap)

    def mlp(self) -> dict[str, tuple[nn.Module, Tensor]]:
        a = self.args
        options = dict(activation="gelu_tanh", dtype=self.dtype)
        make = lambda overlap: ParallelMLP(a.width, 4 * a.width, tp=self.tp(overlap), **options)
        modules = {name: (make(overlap), self.rows) for name, overlap in OVERLAP.items()}
        plan = {"0.fc1": ColwiseParallel(), "0.fc2": RowwiseParallel(output_layouts=Shard(1))}
        return modules | {"DTensor": (self._dtensor(MLP(a.width), plan), self.theirs)}

    def attention(self) -> dict[str, tuple[nn.Module, Tensor]]:
        a = self.args

        def make(overlap: str) -> nn.Module:
            layer = ParallelAttention(a.width, a.heads, tp=self.tp(overlap), causal=True, dtype=self.dtype)
            layer.forward = lambda x, forward=layer.forward: forward(x, batch=a.batch)
            return layer

        modules = {name: (make(overlap), self.rows) for name, overlap in OVERLAP.items()}
        plan = {f"0.{name}": ColwiseParallel() for name in "qkv"} | {"0.out": RowwiseParallel(output_layouts=Shard(1))}
        return modules | {"DTensor": (self._dtensor(Attention(a.width, a.heads, 0.0), plan), self.theirs)}

    def _dtensor(self, module: nn.Module, plan: dict) -> nn.Module:
        gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        return parallelize_module(nn.Sequential(module.to(self.dtype)), self.mesh, plan | {"0": gathered})

    def step(self) -> dict[str, tuple[nn.Module, Tensor]]:
        """Blocks and a norm, forward and backward, dropout on: bench.models.train_step's."""
        a, layers, modules = self.args, full_weights(self.args, KINDS["gpt2"], self.dtype), {}
        for name, overlap in OVERLAP.items():
            stack = OurStack(a, self.tp(overlap), self.dtype, 0.0, "fastest")
            stack.load(layers)
            modules[name] = stack, self.rows
        blocks = [Block(a.width, a.heads, a.dropout, 0.0).to(self.dtype) for _ in layers]
        for block, layer in zip(blocks, layers, strict=True):
            block.load(layer)
        norm = dtensor_norm(nn.LayerNorm(a.width).to(self.dtype), self.mesh)
        return modules | {"DTensor": (Stack([dtensor_block(block, self.mesh) for block in blocks], norm), self.theirs)}


PARTS = {"MLP": Rig.mlp, "attention": Rig.attention, "train step": Rig.step}


def call(module: nn.Module, x: Tensor, backward: bool) -> Callable[[], None]:
    """One run; a gradient of ones, in the layout that the output has."""

    def run() -> None:
        if not backward:
            with torch.no_grad():
                module(x)
            return
        y = module(x.detach().requires_grad_())
        y.backward(
            torch.ones_like(y[:1]).expand_as(y)
            if y.dim() == 3 and y.shape[0] == dist.get_world_size()
            else torch.ones_like(y)
        )
        for p in module.parameters():
            p.grad = None

    return run


class Messages:
    """Stands for the plain form's two messages: records what is sent, or sends nothing and returns tensors that are
    there already."""

    def __init__(self):
        self.kept, self.there = (crossings.all_gather, crossings.all_to_all), {}
        self.sent: list[tuple[bool, torch.Size, torch.dtype]] = []

    def _stand_in(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if (shape, dtype) not in self.there:
            self.there[shape, dtype] = torch.randn(shape).to(dtype)
        return self.there[shape, dtype]

    def without(self, run: Callable[[], None]) -> Callable[[], None]:
        def gather(x: Tensor, size: int, group_name: str) -> Tensor:
            self.sent.append((True, x.shape, x.dtype))
            return self._stand_in((size, *x.shape), x.dtype)

        def to_all(x: Tensor, group_name: str) -> Tensor:
            self.sent.append((False, x.shape, x.dtype))
            return self._stand_in(tuple(x.shape), x.dtype)

        def alone() -> None:
            self.sent.clear()
            crossings.all_gather, crossings.all_to_all = gather, to_all
            try:
                run()
            finally:
                crossings.all_gather, crossings.all_to_all = self.kept

        return alone

    def alone(self, group_name: str) -> Callable[[], None]:
        """Returns a run of the messages that ``without`` omitted when it ran last."""
        gather, to_all = self.kept
        sent = [(is_gather, self._stand_in(tuple(shape), dtype)) for is_gather, shape, dtype in self.sent]
        return lambda: [
            gather(x, dist.get_world_size(), group_name) if is_gather else to_all(x, group_name)
            for is_gather, x in sent
        ]

    def bytes(self) -> int:
        """Sent from each rank."""
        ranks, size = dist.get_world_size(), lambda shape, dtype: shape.numel() * dtype.itemsize
        return sum((ranks - 1) * (size(s, d) if is_gather else size(s, d) // ranks) for is_gather, s, d in self.sent)


# ---- measurement ----


def seconds(run: Callable[[], None]) -> float:
    """From a common start; the slowest rank counts."""
    dist.barrier()
    start = time.perf_counter()
    run()
    took = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def measure(args: argparse.Namespace, rig: Rig, part: str, backward: bool, gbit: float) -> dict:
    modules, messages = PARTS[part](rig), Messages()
    runs = {name: call(module, x, backward) for name, (module, x) in modules.items()}
    runs["compute"] = messages.without(runs["off"])
    runs["compute"]()
    runs["communication"], sent = messages.alone(rig.tp("off").group_name), messages.bytes()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(args.rounds + 2):
        for name, run in runs.items():
            took = seconds(run)
            if i >= 2:
                times[name].append(took)
    mid = {name: statistics.median(values) for name, values in times.items()}
    bound = max(mid["compute"], sent * 8 / (gbit * 1e9) if gbit else mid["communication"])
    ratio = lambda a, b: statistics.median(x / y for x, y in zip(times[a], times[b], strict=True))
    return dict(
        part=part,
        backward=backward,
        gbit=gbit,
        dtype=str(rig.dtype)[6:],
        ranks=args.tp,
        bytes=sent,
        seconds=mid,
        hidden=(mid["off"] - mid["on"]) / min(mid["compute"], mid["communication"]),
        limit=mid["on"] / bound,
        auto_over_off=ratio("auto", "off"),
        over_dtensor=ratio("auto", "DTensor"),
    )


def measure_link(args: argparse.Namespace, rig: Rig) -> dict[str, float]:
    """The numbers that ``auto`` is decided by: GEMM rate, link within this machine, cost of one more message; the best
    of some runs."""
    x, w = torch.randn(2048, 768).to(rig.dtype), torch.randn(1536, 768).to(rig.dtype)
    big, small = torch.zeros(args.tp, 1 << 20), torch.zeros(args.tp, 100, 1)
    group_name, rows = rig.tp("off").group_name, [slice(i, i + 1) for i in range(100)]
    best = lambda run: min(seconds(run) for _ in range(args.rounds))
    gemm = best(lambda: torch.mm(x, w.t()))
    exchange = best(lambda: crossings.all_to_all(big, group_name))
    message = best(lambda: flight.Flight("bench", small, torch.empty_like(small), group_name, rows).post_all().finish())
    message /= len(rows) * (args.tp - 1)
    sent = (args.tp - 1) * big[0].numel() * 4
    return dict(
        gflops=round(2 * w.numel() * len(x) / gemm / 1e9, 1),
        gbit=round(sent * 8 / exchange / 1e9, 2),
        message_us=round(1e6 * message),
    )


def measure_all(args: argparse.Namespace, gbit: float) -> list[dict]:
    """Returns the rows of this rate, and prints each when it is measured; with ``--write`` the links of all dtypes."""
    mesh, rows = dist.device_mesh.init_device_mesh("cpu", (args.tp,)), []
    for dtype in args.dtype:
        rig = Rig(args, DTYPES[dtype], mesh)
        if args.write:
            rows.append({bucket(DTYPES[dtype], (args.tp,)): measure_link(args, rig)})
            continue
        for part in args.part:
            for backward in (True,) if part == "train step" else (False, True):
                rows.append(measure(args, rig, part, backward, gbit))
                if dist.get_rank() == 0:
                    print(line(rows[-1]), flush=True)
    return rows


def launch(args: argparse.Namespace, gbit: float, ends: list[End]) -> list[dict]:
    return of_ranks(measure_all, ends, args, gbit, environment=KEEP)


# ---- output ----


def line(row: dict) -> str:
    direction = "forward + backward" if row["backward"] else "forward"
    times = " | ".join(f"{1e3 * row['seconds'][name]:.1f}" for name in COLUMNS)
    rate = f"{row['gbit']:g}" if row["gbit"] else "unshaped"
    ratios = (
        f"{100 * row['hidden']:.0f} % | {row['limit']:.2f} | {row['auto_over_off']:.2f} | {row['over_dtensor']:.2f}"
    )
    return f"| {row['part']}, {direction} | {row['dtype']} | {rate} | {row['bytes'] / 1e6:.1f} | {times} | {ratios} |"


HEAD = (
    "| part | dtype | Gbit/s | MB sent | "
    + " | ".join(f"{c}, ms" for c in COLUMNS)
    + " | hidden | limit | auto / off | auto / DTensor |"
)


def plot(rows: list[dict], path: str) -> None:
    """Time over rate, a panel a part and direction; unshaped rows are omitted."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row["gbit"]]
    panels = list(dict.fromkeys((row["part"], row["backward"], row["dtype"]) for row in rows))
    columns = max(1, min(3, len(panels)))
    tall = -(-len(panels) // columns)
    figure, axes = plt.subplots(tall, columns, figsize=(3.4 * columns, 2.9 * tall), squeeze=False)
    panels.sort(key=lambda panel: panel[2])
    styles = {"compute": "k:", "communication": "k--", "off": "C7-o", "on": "C0-o", "DTensor": "C1-o"}
    for axis, (part, backward, dtype) in zip(axes.flat, panels):
        points = sorted(
            (r for r in rows if (r["part"], r["backward"], r["dtype"]) == (part, backward, dtype)),
            key=lambda r: r["gbit"],
        )
        for name, style in styles.items():
            axis.plot(
                [r["gbit"] for r in points], [1e3 * r["seconds"][name] for r in points], style, label=name, markersize=3
            )
        direction = ", fwd + bwd" if backward else ", fwd"
        axis.set(xscale="log", ylim=(0, None), xlabel="link, Gbit/s", ylabel="ms", title=f"{part}{direction}, {dtype}")
        axis.set_xticks([r["gbit"] for r in points], [f"{r['gbit']:g}" for r in points])
        axis.minorticks_off()
        axis.title.set_size(9)
    axes.flat[0].legend(fontsize=7)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


def write(args: argparse.Namespace) -> None:
    link: dict[str, dict] = {}
    for args.tp in (2, 4):
        for row in launch(args, 0.0, unshaped(args.tp)):
            link |= row
    table = json.loads(TABLE.read_text())
    table.setdefault("cpu", {})["overlap"] = link
    TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    print(json.dumps(link, indent=1))


def main() -> None:
    args = arguments()
    if args.write:
        return write(args)
    print(HEAD + "\n" + "|---" * HEAD.count(" | ") + "|---|", flush=True)
    rows = [row for rows in at_rates(args.rate, args.tp, partial(launch, args)) for row in rows]
    args.rate = sorted({row["gbit"] for row in rows})
    if args.json:
        with open(args.json, "w") as file:
            json.dump(dict(machine=machine.this_machine(), arguments=vars(args), rows=rows), file, indent=1)
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
