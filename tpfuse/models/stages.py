"""The pipeline stages of a model that are on this rank, under the whole model's names.

The norm behind a stage's last block belongs to the stage that it sends h to, where ``blocks.i.mlp_norm`` then is all
that there is of block i.  A tied embedding is on the first stage and on the last, two copies of one parameter.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..kernels.losses.op import check_ids
from ..kernels.losses.options import IGNORE
from ..kernels.norm import norm_in
from ..kernels.runtime.errors import check
from ..kernels.runtime.function import Function, once_differentiable
from ..kernels.runtime.rules import described
from ..layers.call import Call
from ..layers.hooks import served
from ..layers.module import replicated
from ..layers.wiring import Normed
from ..parallel import TensorParallel
from ..pipeline.placement import Chunk, PartCosts, Stage, chunks_of, held_by, stage_of
from ..pipeline.schedules import placement
from ..sequence_parallel.crossings import expanded
from .config.model import ModelConfig
from .groups import Groups
from .inputs import ALIGNED, Inputs, check_tokens
from .rows import BatchRows
from .stack import FULL, run_blocks


class Batch(NamedTuple):
    """A call's arguments, checked; its rows, the rng of its masks, and what each block is given beside h and n.

    The same on every stage.
    """

    inputs: Inputs
    rows: BatchRows
    call: Call  # of every block


class StagedModel(Protocol):
    """The part of a model that a step over a pipeline uses."""

    tp: TensorParallel
    groups: Groups
    blocks: nn.ModuleList
    config: ModelConfig
    saving: str
    _shared: dict[str, Any]

    @property
    def recompute(self) -> str | None: ...

    def _begin(self, inputs: Inputs) -> Batch: ...
    def _embedded(self, batch: Batch) -> tuple[Tensor, Normed]: ...
    def _finish(self, h: Tensor, normed: Normed, batch: Batch, states: tuple[Tensor, ...] | None) -> Any: ...
    def _agree(self, call: str, arguments: dict[str, Any]) -> None: ...
    def _at_call(self) -> None: ...
    def _counters(self, inputs: Inputs, batch: int) -> tuple[Any, Any]: ...
    def _targets(self, inputs: Inputs) -> Tensor | None: ...
    def _balance_loss(self, sums: tuple[Tensor, ...], inputs: Inputs) -> Tensor | None: ...
    def _count(self, step: int | Tensor | None) -> None: ...
    def _seed_and_step(self) -> dict[str, int]: ...


class _WithLoss(Function):
    """h as it is, beside a part of the loss, whose gradient is 1: as of the loss that backward of the last stage begins
    with."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, loss: Tensor) -> Tensor:
        ctx.kind = loss.dtype, loss.device
        return h.view_as(h)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.kind
        return dh, torch.ones((), dtype=dtype, device=device)


class Border(nn.Module):
    """The part that a stage has of the block in front of its first: the norm of what it is sent."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.mlp_norm = norm


class ModelStages:
    """The pipeline stages of a model that this rank holds: one, and all of it, for a model made without ``stage``.

    ``place``: this rank's place in the pipeline, None for a whole model.  ``chunks``: the stages here.  ``head``:
    whether the whole model ends in logits over its vocabulary.
    """

    def __init__(self, name: str, config: ModelConfig, place: Stage | tuple[Any, ...] | None, *, head: bool):
        check(
            place is None or head,
            f"{name}: pipeline stages need a language-model head, whose loss the last one makes; base models and"
            " classifiers over stages are not built",
        )
        self.name, self.config, self.head = name, config, head
        self._added: list[Tensor] = []
        self.place = None if place is None else stage_of(name, place)
        if self.place is None:
            self.chunks: tuple[Chunk, ...] = (Chunk(0, 1, range(config.num_layers)),)
        else:
            self.chunks = chunks_of(name, self.place, costs(config, head))

    @property
    def has_first(self) -> bool:
        """True where the stage with the embedding is here."""
        return any(chunk.is_first for chunk in self.chunks)

    @property
    def has_last(self) -> bool:
        """True where the stage with the head is here."""
        return any(chunk.is_last for chunk in self.chunks)

    @property
    def has_embedding(self) -> bool:
        """True where the embedding is here, which a head that shares its weight needs too."""
        return self.has_first or (self.has_last and self.head and self.config.tie_embeddings)

    def check_whole(self, caller: str) -> None:
        """Raises ValueError where only some stages are here."""
        check(
            self.place is None,
            f"{self.name}: {caller} needs the whole model, and this rank holds"
            f" {', '.join(f'stage {c.stage}' for c in self.chunks)} of {self.chunks[0].stages}; train it by"
            " tpfuse.pipeline.schedule(model, mesh, ...).step(...)",
        )

    def make_blocks(self, make: Callable[[int], Any], norm: Callable[[], nn.Module] | None) -> nn.ModuleList:
        """Returns the blocks of these stages, each at its place in the whole model, and None in the others'.

        ``make(layer)`` makes a block, ``norm()`` the norm between two; None where there is none to cross a border.
        """
        layers = {layer for chunk in self.chunks for layer in chunk.layers}
        borders = (
            {chunk.layers[0] - 1 for chunk in self.chunks if not chunk.is_first} if norm is not None else set[int]()
        )
        blocks = nn.ModuleList()
        for layer in range(self.config.num_layers):
            block = make(layer) if layer in layers else None
            if norm is not None and block is None and layer in borders:
                block = Border(norm())
            blocks.register_module(str(layer), block)
        for chunk in self.chunks if norm is not None else ():
            last_block: Any = blocks[chunk.layers[-1]]
            if not chunk.is_last:
                last_block.norm_after = False
                if chunk.layers[-1] not in borders:
                    last_block.mlp_norm = None
        return blocks

    def absent_tensors(self) -> set[str]:
        """Returns the tensors that a file may hold for stages on other ranks."""
        if self.place is None:
            return set()
        sources = self.config.hf.sources(self.config).values()
        forms = (form for source in sources for form in (source, source.alternative) if form is not None)
        return {name for form in forms for name in form.names}

    def copies_of(self, name: str) -> int:
        """Returns how many ranks of the pipeline hold the parameter ``name``."""
        if self.place is None:
            return 1
        chains = placement(self.place.schedule, self.place.ranks, held_by(self.place))
        if len(chains) == 2:
            return 2
        tied = self.head and self.config.tie_embeddings and name == "embedding.weight"
        return 2 if tied and chains[0][0] != chains[0][-1] else 1

    # ---- a step over a pipeline ----

    def run(self, model: StagedModel, chunk: Chunk, x: Tensor | None, batch: Batch) -> Tensor:
        """Runs one stage: this rank's h [m, D] of the stage before (the first takes none) -> h [m, D], or of the last
        stage the loss."""
        h, normed = model._embedded(batch) if chunk.is_first else self._received(model, chunk, x)
        blocks = [model.blocks[layer] for layer in chunk.layers]
        h, normed = run_blocks(blocks, h, normed, states=None, full=model.recompute == FULL, call=batch.call)
        if not chunk.is_last:
            added = model._balance_loss(normed.sums, batch.inputs)
            if added is None:
                return h
            self._added.append(added.detach())
            return _WithLoss.apply(h, added)
        loss: Tensor | None = model._finish(h, normed, batch, None).loss
        assert loss is not None  # labels have been asked for
        return loss

    def take_added(self) -> Tensor | None:
        """Returns the sum of what stages here have added to the last one's losses since the last call, or None.

        Each adds the loss of its own layers with experts, whose gradient joins that of h.
        """
        added, self._added = self._added, []
        return torch.stack(added).sum() if added else None

    def _received(self, model: StagedModel, chunk: Chunk, h: Tensor | None) -> tuple[Tensor, Normed]:
        assert h is not None  # what is no first stage is sent one
        border: Any = model.blocks[chunk.layers[0] - 1]
        norm = None if border is None else border.mlp_norm
        if norm is None or getattr(border, "norm_after", False):
            return h, Normed(expanded(self.name, h, model.tp))
        if served(norm):
            return h, Normed(expanded(self.name, norm(h), model.tp))
        weight, bias = replicated(model.tp, norm.weight, norm.bias)
        ranks, recompute = model.tp.row_shards, model.recompute is not None
        h, n, recipe = norm_in(
            h, weight, bias, eps=norm.eps, norm=norm.kind, ranks=ranks, recompute=recompute, leaves=model.tp.row_leaves
        )
        return h, Normed(n, recipe)

    def agree(self, model: StagedModel, arguments: Mapping[str, Any], mode: Mapping[str, Any]) -> None:
        """Compares a step over the tensor-parallel ranks: ValueError on each of them."""
        model._agree("step", _flat({**arguments, **mode}))

    def micro_batches(self, model: StagedModel, count: int, arguments: Mapping[str, Any]) -> list[Batch]:
        """Cuts the arguments of a call into ``count`` calls, whose losses, once :meth:`normalized`, sum to its own.

        ValueError for arguments that are none, that a pipeline does not take, or that cannot be cut evenly: the same on
        every stage.  Nothing is sent.
        """
        name = self.name
        unknown = [key for key in arguments if key not in Inputs._fields]
        check(not unknown, f"{name}: a step takes no {', '.join(unknown)}")
        packed, inputs = arguments.get("cu_seqlens"), Inputs(**arguments)
        check(inputs.labelled, f"{name}: a step over a pipeline needs labels, on every rank")
        for key in ("inputs_embeds", "return_logits", "output_hidden_states", "logits_to_keep", "headless"):
            check(not getattr(inputs, key), f"{name}: {key} is not built over a pipeline")
        check(
            inputs.reduction in ("mean", "sum"), f"{name}: reduction={inputs.reduction!r} is not built over a pipeline"
        )
        check_tokens(name, inputs.input_ids)
        check_ids(f"{name}: input_ids", inputs.tokens, model.config.vocab_size)
        batch = len(inputs.tokens)
        check(batch % count == 0, f"{name}: a batch of {batch} cannot be cut into {count} micro-batches")
        if packed is not None:
            check(
                isinstance(packed, list | tuple) and len(packed) == count == batch,
                f"{name}: packed documents are a row and a cu_seqlens each for {count} micro-batches, got"
                f" {len(packed) if isinstance(packed, list | tuple) else type(packed).__name__} for {batch} rows",
            )
        size = batch // count
        for key in (key for key in ALIGNED if getattr(inputs, key) is not None):
            x = getattr(inputs, key)
            check(
                isinstance(x, Tensor) and len(x) == batch, f"{name}: {key} must have {batch} rows, got {described(x)}"
            )
        step, sample = model._counters(inputs, batch)
        micro = []
        for m in range(count):
            part = {
                key: x[m * size : (m + 1) * size]
                for key in ("input_ids", *ALIGNED)
                if (x := getattr(inputs, key)) is not None
            }
            longest = inputs.max_seqlen[m] if isinstance(inputs.max_seqlen, list | tuple) else inputs.max_seqlen
            part |= dict(cu_seqlens=None if packed is None else packed[m], max_seqlen=longest)
            part |= dict(step=step, first_sample=None if sample is None else sample + m * size)
            micro.append(model._begin(inputs._replace(**part)))
            check_ids(f"{name}: labels", self._labels(model, micro[-1]), model.config.vocab_size, IGNORE)
        return micro

    @staticmethod
    def _labels(model: StagedModel, batch: Batch) -> Tensor:
        targets = model._targets(batch.inputs)
        assert targets is not None  # a step has labels
        return targets

    def normalized(self, model: StagedModel, micro_batches: list[Batch]) -> list[Batch]:
        """Returns calls whose losses are parts of a mean over the labels of all of them, of every replica."""
        first = micro_batches[0].inputs
        if first.reduction != "mean" or first.loss_normalizer is not None:
            return micro_batches
        total = torch.stack([(self._labels(model, batch) != IGNORE).sum() for batch in micro_batches]).sum()
        if (dp := model.groups.dp) is not None:
            dist.all_reduce(total, group=dp)
        normalizer = total.clamp(min=1)
        return [batch._replace(inputs=batch.inputs._replace(loss_normalizer=normalizer)) for batch in micro_batches]


def _flat(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments with each value of a list by itself, as ranks compare them."""
    flat: dict[str, Any] = {}
    for key, value in arguments.items():
        several = isinstance(value, list | tuple)
        flat |= {f"{key}[{i}]": x for i, x in enumerate(value)} if several else {key: value}
    return flat


def costs(c: ModelConfig, head: bool) -> PartCosts:
    """Returns the multiply-adds a token of each part of a model: those of its GEMMs; an embedding is a lookup."""
    heads = c.head_size * (2 * c.num_heads + 2 * c.kv_heads)
    blocks = (c.hidden_size * (heads + c.mlp_shape(layer).columns) for layer in range(c.num_layers))
    return PartCosts(c.hidden_size, tuple(map(float, blocks)), c.hidden_size * c.vocab_size * head)
