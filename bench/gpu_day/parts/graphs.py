"""A block, and a whole training step, captured in CUDA graphs: checked against eager calls and timed beside them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import tpfuse
from bench.gpu_day.part import Context
from bench.gpu_day.parts.layers import BF16, Layer, block_of, named
from tpfuse.kernels.runtime.philox import make_rng
from tpfuse.models import GPT, GPTConfig
from tpfuse.tools.accuracy import rms_error
from tpfuse.tools.bench.definition import Random
from tpfuse.tools.bench.measure import interleaved

STEPS = 3  # that are compared
SECONDS = 2.0


class Captured(nn.Module):
    """A block as a function of tensors alone."""

    def __init__(self, layer: Layer, device: torch.device):
        super().__init__()
        self.block, self.batch = block_of(layer, device), layer.B

    def forward(self, x: Tensor, rng: Tensor) -> Tensor:
        return self.block(x, batch=self.batch, rng=rng)


def warm(step: Callable[[], object]) -> None:
    """Runs a step thrice on a side stream: compiles, allocates, makes what is made once."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)


def capture(step: Callable[[], object]) -> Callable[[], None]:
    """Returns what replays a step."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def jobs(context: Context) -> list[str]:
    return ["block", "training step"]


def run(job: str, context: Context) -> None:
    _block(context) if job == "block" else _step(context)


def judged(context: Context, row: dict, calls: dict[str, Callable[[int], object]]) -> None:
    """Emits the row with the times of both calls; AssertionError where the graph gives anything else than eager."""
    timings = interleaved(calls, 1, context.device, 0.0 if context.tiny else SECONDS, graph_below=0.0)
    times = {f"{name}_ms": timing.p50 * 1e3 for name, timing in timings.items()}
    context.emit(row | times | dict(speed=times["eager_ms"] / times["graph_ms"]))
    if row["difference"] > row["allowed"] or not row["masks_change"]:
        raise AssertionError(f"a replay is not what eager does: {row}")


def _block(context: Context) -> None:
    layer, device = named("BERT-large layer", context.tiny), context.device
    eager, graphed = Captured(layer, device), Captured(layer, device)
    random = Random(BF16, device, 0)
    x, dy = random(layer.S * layer.B, layer.width), random.constant(layer.S * layer.B, layer.width)
    rng = make_rng(0, 1, device=device)
    sample = x.detach().clone().requires_grad_(), rng.clone()
    graphed = torch.cuda.make_graphed_callables(graphed, sample, allow_unused_input=True)

    def both_ways(module: nn.Module, step: int) -> list[Tensor]:
        y = module(x, make_rng(0, step, device=device))
        return [y.detach().clone(), *(g.clone() for g in torch.autograd.grad(y, [x, *module.parameters()], dy))]

    pairs = [(both_ways(graphed, step), both_ways(eager, step)) for step in range(STEPS)]
    difference = max(rms_error(a, b) for ours, plain in pairs for a, b in zip(ours, plain, strict=True))
    change = all(not torch.equal(pairs[i][0][0], pairs[0][0][0]) for i in range(1, STEPS))
    row = dict(what="block", replays=STEPS, difference=difference, allowed=1e-2, masks_change=change)
    call = lambda module: lambda _: torch.autograd.grad(module(x, rng), [x, *module.parameters()], dy)
    judged(context, row, dict(eager=call(eager), graph=call(graphed)))


def model_of(tiny: bool, device: torch.device) -> tuple[GPT, Tensor]:
    """-> a GPT in bf16, and a batch"""
    width, depth, S, B = (32, 1, 8, 1) if tiny else (1024, 8, 512, 8)
    sizes = dict(hidden_size=width, num_layers=depth, num_heads=2 if tiny else 16, max_positions=S)
    model = GPT(GPTConfig(vocab_size=256 if tiny else 50304, **sizes), seed=0).to(device, BF16)
    return model, Random(BF16, device, 0).ids(256, B, S)


def _step(context: Context) -> None:
    device = context.device
    losses, steps = {}, {}
    for name in ("eager", "graph"):
        model, ids = model_of(context.tiny, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=True, foreach=True)
        loss = torch.zeros((), device=device)

        def step(model=model, optimizer=optimizer, loss=loss, ids=ids) -> None:
            optimizer.zero_grad(set_to_none=False)
            value = model(ids, labels=ids, first_sample=0).loss
            value.backward()
            loss.copy_(value.detach())
            tpfuse.clip_grad_norm_(model, 1.0)
            optimizer.step()

        warm(step)
        steps[name] = step if name == "eager" else capture(step)
        losses[name] = []
        for _ in range(STEPS):
            steps[name]()
            losses[name].append(float(loss))
    difference = max(abs(a - b) / abs(b) for a, b in zip(losses["graph"], losses["eager"], strict=True))
    row = dict(what="training step", replays=STEPS, losses=losses, difference=difference, allowed=2e-2)
    row["masks_change"] = _masks_change(context)
    judged(context, row, {name: lambda _, step=step: step() for name, step in steps.items()})


def _masks_change(context: Context) -> bool:
    """Returns whether the loss of one batch differs from replay to replay, weights being what they are."""
    model, ids = model_of(context.tiny, context.device)
    with torch.no_grad():
        loss = torch.zeros((), device=context.device)
        forward = lambda: loss.copy_(model(ids, labels=ids, first_sample=0).loss)
        warm(forward)
        replay, losses = capture(forward), []
        for _ in range(STEPS):
            replay()
            losses.append(float(loss))
    return len(set(losses)) == STEPS


def headline(rows: list[dict]) -> str:
    return ", ".join(
        f"{r['what']} {r['eager_ms']:.2f} ms eager, {r['graph_ms']:.2f} ms as a graph, difference {r['difference']:.0e}"
        for r in rows
    )
