"""Two transformer layers, forward and backward: launched from Python, and (on a GPU) replayed from a CUDA graph."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bench.gpu_day.part import Context
from bench.gpu_day.parts.rows import card_of
from bench.gpu_day.sheets import data_sheet
from bench.models.peers import Block
from tpfuse.kernels.runtime.philox import make_rng
from tpfuse.layers import TransformerBlock
from tpfuse.tools.bench.definition import Random
from tpfuse.tools.bench.measure import interleaved, side_stream
from tpfuse.tools.bench.run import attempt

SECONDS = 2.0  # for all providers of a layer
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Layer:
    """A block to train: B samples of S positions."""

    name: str
    width: int
    heads: int
    B: int
    S: int
    dropout: float
    bert: bool  # post-norm, not causal, gelu by erf; otherwise pre-norm, causal, gelu by tanh

    @property
    def flops(self) -> float:
        """Model FLOPs of a forward and backward, as is usual: attention counted in full, causal or not."""
        return 72 * self.B * self.S * self.width**2 * (1 + self.S / (6 * self.width))


def of(tiny: bool) -> tuple[Layer, ...]:
    if tiny:
        return Layer("BERT-large layer", 32, 2, 2, 8, 0.1, True), Layer("GPT 2.7B block", 32, 2, 2, 8, 0.0, False)
    return (
        Layer("BERT-large layer", 1024, 16, 8, 512, 0.1, True),
        Layer("GPT 2.7B block", 2560, 32, 4, 2048, 0.0, False),
    )


def named(name: str, tiny: bool) -> Layer:
    return next(layer for layer in of(tiny) if layer.name == name)


# ---- build(layer, device) -> module(x), its parameters, x, the gradient of what it returns ----


def _data(layer: Layer, device: torch.device, *shape: int) -> tuple[Tensor, Tensor]:
    random = Random(BF16, device, 0)
    return random(*shape), random.constant(*shape)


def block_of(layer: Layer, device: torch.device) -> TransformerBlock:
    torch.manual_seed(0)
    form = dict(causal=False, activation="gelu", wiring="post") if layer.bert else dict(causal=True)
    drop = dict(dropout=layer.dropout, attention_dropout=layer.dropout)
    return TransformerBlock(layer.width, layer.heads, **form, **drop, device=device, dtype=BF16)


def _tpfuse(layer: Layer, device: torch.device) -> tuple:
    block, rng = block_of(layer, device), make_rng(0, 1).to(device)
    forward = lambda x: block(x, batch=layer.B, rng=rng)
    return forward, list(block.parameters()), *_data(layer, device, layer.S * layer.B, layer.width)


def _torch(layer: Layer, device: torch.device, wrap: Callable = lambda module: module) -> tuple:
    torch.manual_seed(0)
    D, p = layer.width, layer.dropout
    if layer.bert:
        options = dict(batch_first=True, device=device, dtype=BF16)
        module = nn.TransformerEncoderLayer(D, layer.heads, 4 * D, p, "gelu", **options)
    else:
        module = Block(D, layer.heads, p, p).to(device, BF16)
    return wrap(module), list(module.parameters()), *_data(layer, device, layer.B, layer.S, D)


def _compiled(layer: Layer, device: torch.device) -> tuple:
    torch._dynamo.reset()
    return _torch(layer, device, lambda module: torch.compile(module, dynamic=False))


PROVIDERS = dict(tpfuse=_tpfuse, torch=_torch, compile=_compiled)


def step_of(layer: Layer, provider: str, device: torch.device) -> Callable[[int], object]:
    module, parameters, x, dy = PROVIDERS[provider](layer, device)
    return lambda _: torch.autograd.grad(module(x), [x, *parameters], dy)


# ---- the part ----


def jobs(context: Context) -> list[str]:
    return [layer.name for layer in of(context.tiny)]


def run(job: str, context: Context) -> None:
    layer, device, notes = named(job, context.tiny), context.device, []
    seconds = 0.0 if context.tiny else SECONDS
    with side_stream(device):
        steps = {}
        for name in PROVIDERS:
            with attempt(name, notes):
                steps[name] = step_of(layer, name, device)
                steps[name](0)
        steps = {name: step for name, step in steps.items() if not any(line.startswith(name) for line in notes)}
        for below in (0.0, float("inf")) if device.type == "cuda" else (0.0,):
            with attempt("timing", notes):
                for name, timing in interleaved(steps, 1, device, seconds, graph_below=below).items():
                    context.emit(row_of(layer, name, timing, card_of(context)))
    for note in notes:
        context.emit(dict(note=f"{layer.name}: {note}"))
    if any(note.startswith(("tpfuse", "timing")) for note in notes):
        raise RuntimeError("; ".join(notes))


def row_of(layer: Layer, provider: str, timing, card) -> dict:
    """``mfu`` is of the data sheet's rate; without one of this card it is None, and the measured rate's share stays."""
    tflops, sheet = layer.flops / timing.p50 / 1e12, data_sheet(card.name)
    times = {f"p{q}_ms": getattr(timing, f"p{q}") * 1e3 for q in (20, 50, 80)}
    shares = dict(matrix_share=tflops / card.matrix_tflops["bf16"], mfu=sheet and tflops / sheet.matrix_tflops)
    return dict(layer=layer.name, provider=provider, timed=timing.method, **times, tflops=tflops, **shares)


def headline(rows: list[dict]) -> str:
    best = {}
    for row in rows:
        if "layer" in row:
            key = row["layer"], row["provider"]
            best[key] = min(best.get(key, float("inf")), row["p50_ms"])
    cells = [f"{layer} by {who} {ms:.2f} ms" for (layer, who), ms in best.items()]
    ours = max((row for row in rows if row.get("provider") == "tpfuse"), key=lambda row: row["tflops"], default=None)
    if ours is not None:
        mfu = (
            f"MFU {100 * ours['mfu']:.0f} % of the data sheet's rate, "
            if ours["mfu"]
            else "no data sheet of this card, "
        )
        cells.append(
            f"tpfuse at best {ours['tflops']:.0f} TFLOP/s: {mfu}{100 * ours['matrix_share']:.0f} % of the measured"
        )
    return ", ".join(cells)
