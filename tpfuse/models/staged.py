"""A model of which only some pipeline stages are here, under the whole model's names.

The norm behind a stage's last block belongs to the stage that it sends h to, where ``blocks.i.norm_mlp`` then is all
that there is of block i.  A tied embedding is on the first stage and on the last, two copies of one parameter.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..kernels.losses.options import IGNORE
from ..kernels.norm import norm_in
from ..kernels.runtime.errors import check
from ..kernels.runtime.rules import described
from ..layers.block import Normed
from ..layers.hooks import served
from ..layers.module import replicated
from ..parallel import resolve
from ..pipeline.placement import Chunk, Costs, Stage, chunks_of, held_by, stage_of
from ..pipeline.schedules import placement
from ..sequence_parallel.crossings import expanded
from .config.gpt import ModelConfig
from .files.filed import FiledModel
from .inputs import ALIGNED, Inputs, check_tokens
from .rows import Rows
from .stack import run_blocks


class Call(NamedTuple):
    """A call's arguments, checked, its rows and the rng of its masks, and what blocks are given beside h and n.

    The same for every stage.
    """

    inputs: Inputs
    rows: Rows
    rng: Tensor | None
    blocks: dict[str, Any]


class Border(nn.Module):
    """What a stage has of the block in front of its first: the norm of what it is sent."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm_mlp = norm


class StagedModel(FiledModel):
    """``stage`` is this rank's place in a pipeline, None for a whole model; ``chunks`` are the stages that it holds."""

    config: ModelConfig
    stage: Stage | None
    chunks: tuple[Chunk, ...]
    pp_group_name: str | None  # known from when a schedule has been made
    blocks: nn.ModuleList
    dp_group_name: str | None
    saving: str
    _full: bool

    def _place(self, stage: "Stage | tuple[Any, ...] | None", *, head: bool) -> None:
        """Decides which stages are here.  ``head``: whether the model ends in logits over its vocabulary."""
        name, c = type(self).__name__, self.config
        self.has_head = head
        check(
            stage is None or head,
            f"{name}: pipeline stages need a language-model head, whose loss the last one makes; base models and"
            " classifiers over stages are not built",
        )
        self.stage, self.pp_group_name = None if stage is None else stage_of(name, stage), None
        if self.stage is None:
            self.chunks = (Chunk(0, 1, range(c.num_layers)),)
        else:
            self.chunks = chunks_of(name, self.stage, costs(c, head))

    @property
    def holds_first(self) -> bool:
        """Whether the stage with the embedding is here."""
        return any(chunk.first for chunk in self.chunks)

    @property
    def holds_last(self) -> bool:
        """Whether the stage with the head is here."""
        return any(chunk.last for chunk in self.chunks)

    @property
    def holds_embedding(self) -> bool:
        """Whether the embedding is here, which a head that shares its weight needs too."""
        return self.holds_first or (self.holds_last and self.has_head and self.config.tie_embeddings)

    def _hold(self, make: Callable[[int], Any], norm: Callable[[], nn.Module] | None) -> nn.ModuleList:
        """Returns the blocks of these stages, each at its place in the whole model, and None in the others'.

        ``make(layer)`` makes a block, ``norm()`` the norm between two; None where there is none to cross a border.
        """
        held = {layer for chunk in self.chunks for layer in chunk.layers}
        borders = {chunk.layers[0] - 1 for chunk in self.chunks if not chunk.first} if norm is not None else set[int]()
        blocks = nn.ModuleList()
        for layer in range(self.config.num_layers):
            block = make(layer) if layer in held else None
            if norm is not None and block is None and layer in borders:
                block = Border(norm())
            blocks.register_module(str(layer), block)
        for chunk in self.chunks if norm is not None else ():
            last: Any = blocks[chunk.layers[-1]]
            if not chunk.last:
                last.norm_after = False
                if chunk.layers[-1] not in borders:
                    last.norm_mlp = None
        return blocks

    def run_chunk(self, chunk: Chunk, x: Tensor | None, call: Call) -> Tensor:
        """Runs one stage: this rank's h [m, D] of the stage before (the first takes none) -> h [m, D]; of the last, the
        loss.
        """
        h, normed = self._embedded(call) if chunk.first else self._received(chunk, x)
        blocks = [self.blocks[layer] for layer in chunk.layers]
        h, normed = run_blocks(blocks, h, normed, states=None, full=self._full, **call.blocks)
        if not chunk.last:
            return h
        loss: Tensor | None = self._finish(h, normed, call, None).loss
        assert loss is not None  # labels have been asked for
        return loss

    def _received(self, chunk: Chunk, h: Tensor | None) -> tuple[Tensor, Normed]:
        assert h is not None  # what is no first stage is sent one
        border: Any = self.blocks[chunk.layers[0] - 1]
        norm = None if border is None else border.norm_mlp
        if norm is None or getattr(border, "norm_after", False):
            return h, Normed(expanded(type(self).__name__, h, self.tp))
        if served(norm):
            return h, Normed(expanded(type(self).__name__, norm(h), self.tp))
        weight, bias = replicated(self.tp, norm.weight, norm.bias)
        how: dict[str, Any] = dict(ranks=self.tp.row_shards, recompute=self._full or self.saving == "smallest")
        h, n, recompute = norm_in(h, weight, bias, eps=norm.eps, norm=norm.kind, **how)
        return h, Normed(n, recompute)

    def _begin(self, inputs: Inputs) -> Call:
        """Checks the arguments of a call, and makes what all of its blocks need."""
        raise NotImplementedError

    def _embedded(self, call: Call) -> tuple[Tensor, Normed]:
        """Returns h and n of the first block."""
        raise NotImplementedError

    def _finish(self, h: Tensor, normed: Normed, call: Call, states: tuple[Tensor, ...] | None) -> Any:
        """Returns the Output for what leaves the last block."""
        raise NotImplementedError

    # ---- a step over a pipeline ----

    def micro_batches(self, count: int, arguments: dict[str, Any]) -> list[Call]:
        """Cuts the arguments of a call into ``count`` calls, whose losses sum to its own.

        ValueError for arguments that are none, that a pipeline does not take, or that cannot be cut evenly: the same on
        every stage, before anything is sent.
        """
        name = type(self).__name__
        self._compare("step", _flat(arguments))
        unknown = [key for key in arguments if key not in Inputs._fields]
        check(not unknown, f"{name}: a step takes no {', '.join(unknown)}")
        packed, inputs = arguments.get("cu_seqlens"), Inputs(**arguments)
        check(inputs.labels is not None, f"{name}: a step over a pipeline needs labels, on every rank")
        for key in ("inputs_embeds", "return_logits", "output_hidden_states"):
            check(not getattr(inputs, key), f"{name}: {key} is not built over a pipeline")
        check(
            inputs.reduction in ("mean", "sum"), f"{name}: reduction={inputs.reduction!r} is not built over a pipeline"
        )
        check_tokens(name, inputs.input_ids)
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
        step, first = self._counters(inputs, batch)
        micro = []
        for m in range(count):
            part = {
                key: x[m * size : (m + 1) * size]
                for key in ("input_ids", *ALIGNED)
                if (x := getattr(inputs, key)) is not None
            }
            longest = inputs.max_seqlen[m] if isinstance(inputs.max_seqlen, list | tuple) else inputs.max_seqlen
            part |= dict(cu_seqlens=None if packed is None else packed[m], max_seqlen=longest)
            part |= dict(step=step, first_sample=None if first is None else first + m * size)
            micro.append(inputs._replace(**part))
        if inputs.reduction == "mean" and inputs.loss_normalizer is None:
            total = torch.stack([self.labelled(part) for part in micro]).sum()
            if (dp := self.dp_group()) is not None:
                dist.all_reduce(total, group=dp)
            micro = [part._replace(loss_normalizer=total.clamp(min=1)) for part in micro]
        return [self._begin(part) for part in micro]

    def labelled(self, inputs: Inputs) -> Tensor:
        """Returns how many labels of a call count, int64 []."""
        assert inputs.labels is not None
        return (inputs.labels != IGNORE).sum()

    def _compare(self, call: str, arguments: dict[str, Any]) -> None:
        """Compares a call over the tensor-parallel ranks."""
        raise NotImplementedError

    def _counters(self, inputs: Inputs, batch: int) -> tuple[Any, Any]:
        """Returns the step and the first sample that choose a call's masks; None where nothing is dropped."""
        raise NotImplementedError

    def check_whole(self, what: str) -> None:
        """Raises ValueError where only some stages are here."""
        check(
            self.stage is None,
            f"{type(self).__name__}: {what} needs the whole model, and this rank holds"
            f" {', '.join(f'stage {c.stage}' for c in self.chunks)} of {self.chunks[0].stages}; train it by"
            " tpfuse.pipeline.schedule(model, mesh, ...).step(...)",
        )

    def elsewhere(self) -> tuple[str, ...]:
        if self.stage is None:
            return ()
        return tuple(re.escape(n) for source in self.config.hf.sources(self.config).values() for n in source.names)

    def copies_of(self, name: str) -> int:
        """Returns how many ranks of the pipeline hold the parameter ``name``."""
        if self.stage is None:
            return 1
        chains = placement(self.stage.schedule, self.stage.ranks, held_by(self.stage))
        if len(chains) == 2:
            return 2
        tied = self.has_head and self.config.tie_embeddings and name == "embedding.weight"
        return 2 if tied and chains[0][0] != chains[0][-1] else 1

    def dp_group(self) -> dist.ProcessGroup | None:
        """Returns the replicas that the model was given; None for none."""
        return None if self.dp_group_name is None else resolve(self.dp_group_name)

    def stages(self, caller: str) -> dist.ProcessGroup | None:
        """Returns the ranks that hold this model's stages; None for a whole model.

        ValueError of ``caller`` before a schedule has been made.
        """
        if self.stage is None:
            return None
        if self.pp_group_name is None:
            raise ValueError(
                f"{caller}: the model is one rank's stages, and the others are not known before"
                " tpfuse.pipeline.schedule(model, mesh, ...)"
            )
        return resolve(self.pp_group_name)


def staged_in(model: nn.Module) -> StagedModel | None:
    """Returns the model in ``model``, or itself, of which only some stages are here; None where there is none."""
    found = (module for module in model.modules() if isinstance(module, StagedModel) and module.stage is not None)
    return next(found, None)


def _flat(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments with each value of a list by itself, as ranks compare them."""
    flat: dict[str, Any] = {}
    for key, value in arguments.items():
        several = isinstance(value, list | tuple)
        flat |= {f"{key}[{i}]": x for i, x in enumerate(value)} if several else {key: value}
    return flat


def costs(c: ModelConfig, head: bool) -> Costs:
    """Returns the multiply-adds a token of each part of a model: those of its GEMMs; an embedding is a lookup."""
    heads = c.head_size * (2 * c.num_heads + 2 * c.kv_heads)
    block = c.hidden_size * (heads + c.ffn_width * (3 if c.gated else 2))
    return Costs(c.hidden_size, (float(block),) * c.num_layers, c.hidden_size * c.vocab_size * head)
