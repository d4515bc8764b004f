"""One layer of a model, counted: tpfuse's block inside its stack, beside a plain torch layer and the 2020 table.

A block is taken out of the real model with the arguments that the model calls it with, so what is counted is what a
stack runs: the norm that enters it and the embedding's are not in it, the norms after its two GEMM pairs are.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map

from ...kernels.runtime.errors import check
from ...layers.block import SAVING
from ...layers.shapes import MLPShape, MoEShape
from ...models import with_head
from ...models.config.gpt import GPTConfig
from ...models.config.model import ModelConfig
from ...models.model import Model
from ...models.stack import FULL
from ...parallel import TensorParallel
from ...pipeline.placement import Stage
from ...sequence_parallel.assumed import assumed_imbalance
from . import operators
from .aten import ATTENTION, GEMM, KINDS
from .operators import LayerSizes, Operator, flash
from .plain import PlainLayer
from .recorder import PHASES, Entry, Ledger, Row, add_up
from .shapes import Shape, check_imbalance
from .text import quantity, table

MOST_TOKENS = 1 << 28  # torch counts the bytes of a tensor, such as attention's scores, in 64 bits


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Makes ``dtype`` torch's default dtype for a while."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def build(
    config: ModelConfig,
    *,
    tp: TensorParallel | None = None,
    dp: DeviceMesh | None = None,
    experts: DeviceMesh | TensorParallel | None = None,
    saving: str,
    full: bool = False,
    dtype: torch.dtype,
    device: str = "meta",
    stage: Stage | None = None,
) -> Model:
    """Returns the real model, with its language-model head; ``full``: recompute="full".

    ValueError for sizes that cannot be split.
    """
    make = with_head if experts is None else functools.partial(with_head, experts=experts)  # Bert has none
    with default_dtype(dtype), torch.device(device):
        return make(config, tp=tp, dp=dp, saving=saving, recompute=FULL if full else None, stage=stage)


def check_tokens(batch: int, seq: int) -> None:
    """Raises ValueError for more tokens than MOST_TOKENS: a size in bytes may not fit into 64 bits."""
    check(
        batch * seq <= MOST_TOKENS,
        f"a rank's batch must have at most {MOST_TOKENS:,} tokens, got {batch:,} sequences of {seq:,}",
    )


def token_ids(batch: int, seq: int) -> Tensor:
    """Returns token ids [batch, seq] on the meta device; ValueError for more than torch can count the bytes of."""
    check_tokens(batch, seq)
    return torch.zeros(batch, seq, dtype=torch.int64, device="meta")


LayerKind = tuple[int | None, MLPShape | MoEShape]  # the window of attention, and the MLP or experts


def layer_kinds(config: ModelConfig) -> list[LayerKind]:
    return list(zip(config.windows, map(config.mlp_shape, range(config.num_layers)), strict=True))


def with_layers(config: ModelConfig, layers: int, like: int = 0) -> ModelConfig:
    """Returns the config of a model of so many layers, each of which is like layer ``like`` of this one."""
    types = None if config.layer_types is None else (config.layer_types[like],) * layers
    if not isinstance(config, GPTConfig):
        return replace(config, num_layers=layers, layer_types=types)
    mlps = tuple(range(layers)) if like in config.mlp_layers else ()
    return replace(config, num_layers=layers, layer_types=types, mlp_layers=mlps)


class _Taken(Exception):
    pass


def take_block(
    config: ModelConfig, *, batch: int, seq: int, saving: str, dtype: torch.dtype, tp: TensorParallel | None = None
) -> Callable[[], None]:
    """Returns a function that runs forward and backward of the model's first block on meta tensors."""
    model = build(with_layers(config, 1), tp=tp, saving=saving, dtype=dtype)
    taken: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taken.append((args, kwargs))
        raise _Taken

    block = model.blocks[0]
    hook = block.register_forward_pre_hook(note, with_kwargs=True)
    with contextlib.suppress(_Taken):
        ids = token_ids(batch, seq)
        model(ids, labels=ids, first_sample=0)
    hook.remove()
    leaf = lambda t: t.detach().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t
    args, kwargs = tree_map(leaf, taken[0])
    inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]

    def run() -> None:
        outputs = [t for t in tree_leaves(block(*args, **kwargs)) if isinstance(t, Tensor) and t.requires_grad]
        grads = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in outputs]  # the R parts of n's are not one
        torch.autograd.grad(outputs, [*inputs, *block.parameters()], grads, allow_unused=True)

    return run


def trace(run: Callable[[], None]) -> Ledger:
    with Ledger() as ledger:
        run()
    return ledger


def plain_layer(
    config: ModelConfig, *, batch: int, seq: int, dtype: torch.dtype, activation_dropout: float = 0.0
) -> Callable[[], None]:
    """Returns a function that runs forward and backward of a plain torch layer of the same sizes on meta tensors."""
    s = Shape.of(config)
    layer = PlainLayer(
        s.D,
        s.H,
        s.F,
        config.dropout,
        wiring=config.wiring,
        activation=nn.ReLU if config.activation == "relu" else nn.GELU,
        activation_dropout=activation_dropout,
        device="meta",
        dtype=dtype,
    )
    x = torch.empty(batch, seq, s.D, device="meta", dtype=dtype).requires_grad_()

    def run() -> None:
        torch.autograd.grad(layer(x), [x, *layer.parameters()], torch.empty_like(x))

    return run


# ---- side by side ----


class Column(NamedTuple):
    """A version of the layer: its title, and (part of the layer, entry) of each op.

    Entries of the operator table have no storages.
    """

    title: str
    entries: list[tuple[str, Entry]]

    def total(self, test: Callable[[str, Entry], bool] = lambda part, e: True) -> Row:
        """Returns the sum of the entries that pass ``test``."""
        return add_up(e for part, e in self.entries if test(part, e))


def _of(column: Column, key: str) -> Row:
    """Returns the sum of the entries of a kind or a phase."""
    return column.total(lambda _, e: key in (e.kind, e.phase))


def _of_table(title: str, rows: list[Operator], sizes: LayerSizes, element_size: int) -> Column:
    entries = []
    for o in rows:
        r = sizes.row(o, element_size)
        entry = Entry(o.name, o.kind, o.phase, read=r.read, written=r.written, least=r.least, flops=r.flops)
        entries.append((o.part, entry))
    return Column(title, entries)


_PARTS = {  # of ATen's ops in PlainLayer
    "addmm": operators.PRODUCTS,
    "mm": operators.PRODUCTS,
    "bmm": operators.PRODUCTS,
    "sum": operators.BIAS,
    "_softmax": operators.SOFTMAX,
    "_softmax_backward_data": operators.SOFTMAX,
    "native_layer_norm": operators.NORMS,
    "native_layer_norm_backward": operators.NORMS,
    "clone": operators.COPIES,
    "stack": operators.COPIES,
}


def _part(e: Entry, scores: int) -> str:
    """Returns the part of the layer that an entry belongs to.

    Dropout and scaling of the attention scores, which take ``scores`` bytes, belong to the softmax.
    """
    if e.op in _PARTS:
        return _PARTS[e.op]
    if max(size for _, size in e.outputs) >= scores:
        return operators.SOFTMAX
    return operators.DROPOUT if e.op.startswith("native_dropout") else operators.OTHER


_WHY = {
    operators.PRODUCTS: "the same operands, and the bias vectors",
    operators.BIAS: "torch adds them inside the product (addmm); their gradients are the same sums",
    operators.SOFTMAX: "torch runs scale, softmax and dropout one by one; the table has one kernel each way",
    operators.DROPOUT: "a mask of one byte an element; the table counts a word",
    operators.NORMS: "torch counts one pass backward; the table has dgamma, dbeta apart from dx",
    operators.OTHER: "the same",
    operators.COPIES: "q, k, v and their gradients are copied between the layouts of linear and of bmm",
}


class Comparison(NamedTuple):
    config: ModelConfig
    batch: int
    seq: int
    element_size: int
    columns: list[Column]
    traces: dict[str, Ledger]  # of what was run, by title

    def __str__(self) -> str:
        s = Shape.of(self.config)
        experts = "" if s.experts is None else f", {s.experts.routing.k} of {s.experts.num_experts} experts"
        if s.experts is not None and s.experts.shared_size is not None:
            experts += f" and a shared one of width {s.experts.shared_size}"
        head = f"B={self.batch}, S={self.seq}, D={s.D}, H={s.H}, F={s.F}{experts}, {8 * self.element_size} bit"
        rows: list[tuple[str, ...]] = []
        for key in (*KINDS, *PHASES):
            rows.append((key, *(quantity(_of(c, key).moved, "B") for c in self.columns)))
        totals = [c.total() for c in self.columns]
        rows.append(("bytes", *(f"{t.moved / 1e6:.1f} MB" for t in totals)))
        rows.append(("words", *(f"{t.moved / self.element_size / 1e6:.1f} M" for t in totals)))
        outside = [c.total(lambda _, e: e.kind not in (GEMM, ATTENTION)) for c in self.columns]
        rows.append(("outside GEMM, attention", *(f"{t.moved / self.element_size / 1e6:.1f} Mwords" for t in outside)))
        rows.append(("at least, op by op", *(f"{t.least / 1e6:.1f} MB" for t in totals)))
        rows.append(("sent to other ranks", *(quantity(t.wire, "B") for t in totals)))
        rows.append(("flops", *(f"{t.flops / 1e9:.3f} G" for t in totals)))
        text = [
            f"One layer inside its stack, forward + backward: {head}",
            table(("", *(c.title for c in self.columns)), rows),
        ]
        if len(self.columns) > len(SAVING):
            text += ["", "plain torch against the unfused operators, in Mwords:", self._difference()]
        return "\n".join(text)

    def difference(self) -> list[tuple[str, float, float, str]]:
        """Returns (part, words of plain torch, words of the unfused table, why they differ) for every part."""
        count = lambda c, part: c.total(lambda p, _: p == part).moved / self.element_size
        torch_, table_ = self.columns[:2]
        return [(part, count(torch_, part), count(table_, part), why) for part, why in _WHY.items()]

    def _difference(self) -> str:
        rows = [
            (part, f"{a / 1e6:.1f}", f"{b / 1e6:.1f}", f"{(a - b) / 1e6:+.1f}", why)
            for part, a, b, why in self.difference()
        ]
        a, b = (c.total().moved / self.element_size / 1e6 for c in self.columns[:2])
        rows.append(("total", f"{a:.1f}", f"{b:.1f}", f"{a - b:+.1f}", ""))
        return table(("", "torch", "table", "differ", ""), rows)

    def json(self) -> dict[str, Any]:
        """Returns plain numbers, by column."""

        def column(c: Column) -> dict[str, Any]:
            kinds = {kind: _of(c, kind)._asdict() for kind in KINDS}
            return dict(
                total=c.total()._asdict(),
                bytes=c.total().moved,
                words=c.total().moved // self.element_size,
                by_kind=kinds,
            )

        return {c.title: column(c) for c in self.columns}


PLAIN, TABLE, TABLE_FUSED, TABLE_FLASH = "plain torch", "table unfused", "table fused", "fused + flash"


def compare(
    config: ModelConfig,
    *,
    batch: int,
    seq: int,
    dtype: torch.dtype = torch.bfloat16,
    tp: TensorParallel | None = None,
    imbalance: float = 1.0,
    layer: int = 0,
) -> Comparison:
    """Counts every version of one layer, number ``layer`` of the model.

    Grouped heads, gated MLPs, those beside attention and experts have no row in the table of 2020, so for them there
    are tpfuse's columns alone.  ``imbalance``: of the rank whose experts have the most rows, these over the mean.
    ValueError for one that the ranks cannot have, and for a layer that is not there.
    """
    check_tokens(batch, seq)
    s = Shape.of(config, layer)
    config = with_layers(config, 1, like=layer)
    check_imbalance("ledger", config, imbalance, 1 if tp is None else tp.size)
    s, element_size = Shape.of(config), dtype.itemsize
    columns: list[Column] = []
    traces: dict[str, Ledger] = {}
    one_process = tp is None or tp.call_size == 1
    if one_process and not (s.gated or s.parallel) and s.G == s.H and s.H * s.E == s.D:
        traces[PLAIN] = trace(plain_layer(config, batch=batch, seq=seq, dtype=dtype, activation_dropout=config.dropout))
        scores = batch * s.H * seq * seq * element_size
        columns.append(Column(PLAIN, [(_part(e, scores), e) for e in traces[PLAIN].entries]))
        sizes = LayerSizes(B=batch, S=seq, D=s.D, H=s.H, F=s.F)
        for title, rows in (
            (TABLE, operators.UNFUSED),
            (TABLE_FUSED, operators.FUSED),
            (TABLE_FLASH, flash(operators.FUSED)),
        ):
            columns.append(_of_table(title, rows, sizes, element_size))
    for saving in SAVING:
        title = f"tpfuse {saving}"
        with assumed_imbalance(imbalance):
            traces[title] = trace(take_block(config, batch=batch, seq=seq, saving=saving, dtype=dtype, tp=tp))
        columns.append(Column(title, [("", e) for e in traces[title].entries]))
    return Comparison(config, batch, seq, element_size, columns=columns, traces=traces)
