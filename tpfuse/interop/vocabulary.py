"""The embedding and the head of a parallelized model with transformers' interface, and their resizing.

Each is the model's own layer, which holds this rank's rows of the table.  Called with whole tensors, [B, S] ids or
[B, S, D] hidden states, it returns whole ones; the model's own calls pass this rank's rows.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..collectives import collect
from ..kernels.losses.op import check_ids
from ..kernels.runtime.errors import check
from ..kernels.runtime.main_grad import PLACES
from ..kernels.runtime.rules import COUNT, check_number
from ..layers.embedding import VocabParallelEmbedding
from ..layers.module import ParallelModule, Spec, local
from ..layers.state import as_whole, is_split
from ..layers.wiring import Normed
from ..models.files.read import NamedTensors
from ..models.files.write import full_tensor
from ..models.head import LMHead
from ..models.model import Model
from ..models.rows import BatchRows
from ..parallel import TensorParallel
from ..ranks.agreement import Agreement, Header, agree
from ..ranks.messages import together
from ..sequence_parallel.crossings import expanded
from ..training.data_parallel import under_ddp

_CAUSE = "call torch.manual_seed with one seed on every rank before"


def whole_parameter(name: str) -> property:
    """Returns an attribute that shows a parameter as other libraries take it, which read its shape or multiply by it.

    On one rank it is the parameter; where rows are split, a DTensor of the whole in the memory of this rank's rows,
    whose ``full_tensor()`` gives every rank all rows, and each its rows' gradient.  Optimizers take ``parameters()``.
    """

    def get(layer: Any) -> Tensor | None:
        if name not in layer._parameters:  # torch is about to compute it from another one
            raise AttributeError(name)
        if layer.shard(name) is None and name == "weight":
            layer = layer.embedding[0]  # a tied head's
        p = layer.shard(name)
        return p if p is None or not is_split(layer.specs[name], layer.tp) else as_whole(p, layer.specs[name], layer.tp)

    return property(get)


class InputEmbeddings(VocabParallelEmbedding):
    """The result of get_input_embeddings: the model's split embedding, which also takes a batch.

    ``weight`` [V, D] is the whole table, ``num_embeddings`` is V.
    """

    weight = whole_parameter("weight")

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [B, S], the same on every rank -> rows [B, S, D], whole on every rank, as inputs_embeds.

        ids [M] -> this rank's rows [m, D].  ValueError for an id outside the vocabulary.
        """
        if ids.dim() != 2:
            return super().forward(ids)
        _check_gathered("get_input_embeddings()", self)
        if self._agreement is not None:
            self._agreement(self.tp.call_group, {"input_ids": ids}, {})
        check_ids("get_input_embeddings(): input_ids", ids, self.num_embeddings)
        rows = BatchRows(ids.shape, self.tp)
        return rows.collected(super().forward(rows.all(ids, -1)))


class OutputEmbeddings(LMHead):
    """The result of get_output_embeddings: the model's split head, which also takes whole hidden states.

    ``weight`` [V, D] is the whole one, the embedding's where they are tied, and ``bias`` [V].
    """

    embedding: tuple[VocabParallelEmbedding]  # in a tuple, so that it is no part of the head
    weight = whole_parameter("weight")
    bias = whole_parameter("bias")

    def forward(self, hidden: Normed | Tensor, weight: Tensor | None = None) -> Tensor:
        """hidden [B, S, D], whole and the same on every rank -> logits [B, S, V], whole on every rank.

        The model's own call is on this rank's rows, as LMHead's.
        """
        if not isinstance(hidden, Tensor):
            return super().forward(hidden, weight)
        layer = self.embedding[0] if self.shard("weight") is None else self
        _check_gathered("get_output_embeddings()", layer)
        check(hidden.dim() == 3, f"get_output_embeddings(): hidden states must be [B, S, D], got {tuple(hidden.shape)}")
        rows = BatchRows(hidden.shape[:2], self.tp)
        normed = Normed(expanded("get_output_embeddings()", rows.share(hidden), self.tp))
        return whole_logits(rows.back(super().forward(normed, local(layer.shard("weight")))), self.vocab_size, self.tp)


def gathered(layer: ParallelModule) -> bool:
    """Returns True if this rank's rows are in memory: fully_shard gathers them only for the wrapped forward."""
    wholes = ((local(layer.shard(leaf)), spec) for leaf, spec in layer.specs.items())
    return all(tuple(p.shape) == tuple(s.stop - s.start for s in spec.local(layer.tp)) for p, spec in wholes)


def _check_gathered(name: str, layer: ParallelModule) -> None:
    check(
        gathered(layer),
        f"{name}: fully_shard holds a part of this rank's rows, and gathers them for the model's forward alone; call it"
        " before fully_shard, or from a hook on it, which the model's forward calls",
    )


def whole_logits(logits: Tensor, vocab_size: int, tp: TensorParallel) -> Tensor:
    """[B, S, V/R], of which the last rank's may be narrower -> [B, S, V].

    Every rank then uses them in the same way, so the adjoint is a slice (collect): a sum over the ranks (gather) would
    count the loss R times.
    """
    return collect(logits, tp, dim=-1, size=vocab_size)


def open_ends(model: Model) -> None:
    """Gives the embedding and the head of a model the classes of this file."""
    model.embedding.__class__ = InputEmbeddings
    model.embedding._agreement = Agreement(Header("get_input_embeddings()"), each_call=True)
    if isinstance(model.head, LMHead):
        head: Any = model.head
        head.__class__, head.embedding = OutputEmbeddings, (model.embedding,)


class Vocabulary:
    """The methods of transformers' models that are about their vocabulary."""

    parallel: Model
    tpfuse_original: type
    tpfuse_resized = False  # True if the vocabulary differs from that of the model's files
    config: Any

    def get_input_embeddings(self) -> nn.Module:
        """Returns the embedding, ``module.parallel.embedding``: see :class:`InputEmbeddings`."""
        return self.parallel.embedding

    def get_output_embeddings(self) -> nn.Module | None:
        """Returns the head over the vocabulary, ``module.parallel.head``: see :class:`OutputEmbeddings`; else None."""
        return self.parallel.head if isinstance(self.parallel.head, LMHead) else None

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Raises NotImplementedError unless ``value`` is the embedding that is there: another would not be split."""
        self._keeps("set_input_embeddings", value, self.get_input_embeddings())

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Raises NotImplementedError unless it is the head that is there: another would not be split."""
        self._keeps("set_output_embeddings", new_embeddings, self.get_output_embeddings())

    def _keeps(self, method: str, value: nn.Module, there: nn.Module | None) -> None:
        if value is not there:
            raise NotImplementedError(
                f"{method} of a parallelized {type(self).__name__}: the table is split over the ranks, and another"
                " module would not be; set it before tpfuse.parallelize, give load_state_dict the whole tensors, or"
                " call resize_token_embeddings"
            )

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: tied weights are one parameter.  ValueError if the config has changed since parallelize."""
        tied, declared = self.parallel.config.tie_embeddings, bool(self.config.tie_word_embeddings)
        check(
            tied == declared or self.parallel.head is None,
            f"tie_weights of a parallelized {type(self).__name__}: config.tie_word_embeddings={declared}, and it was"
            f" parallelized with {tied}; set it before tpfuse.parallelize",
        )

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Gives the table ``new_num_tokens`` rows, or the next multiple of ``pad_to_multiple_of``; returns the layer.

        New rows are those of transformers, drawn from torch's generator, bitwise the same at every split; old rows do
        not change.  Every rank calls it, after the same torch.manual_seed; during the call each holds the whole table.
        Parameters stay the same objects, without gradients.  An optimizer that has stepped holds state of the old
        shape, so make it afterwards.

        ValueError, before anything changes, for a number that leaves a rank without rows, for a model on the meta
        device or under DistributedDataParallel, fully_shard or MainGrad, and if the ranks would draw different rows.
        """
        model, groups, previous = self.parallel, self.parallel.groups.all(), self.parallel.config.vocab_size
        _agree(
            groups,
            dict(new_num_tokens=new_num_tokens, pad_to_multiple_of=pad_to_multiple_of, mean_resizing=mean_resizing),
        )
        count = together(lambda: _count(previous, new_num_tokens, pad_to_multiple_of), groups)
        if count == previous:
            return model.embedding
        config = together(lambda: self._resizable(count), groups)
        values = self._resized(count, mean_resizing)
        if count > previous:
            bits = lambda x: x.detach().contiguous().view(torch.uint8)
            _agree(groups, {f"{name} ({_CAUSE})": bits(value[previous:]) for name, (value, _) in values.items()})
        for name, (value, spec) in values.items():
            path, _, leaf = name.rpartition(".")
            layer: Any = model.get_submodule(path)
            layer.specs[leaf], p = spec, layer.shard(leaf)
            p.data, p.grad = value[spec.local(layer.tp)].clone(), None
        _resize_layers(model, count)
        model.config = config
        self.config.get_text_config().vocab_size = self.vocab_size = count
        self.tpfuse_resized = True
        return model.embedding

    def _resizable(self, count: int) -> Any:
        """Returns the config of the resized model; ValueError if this model cannot be resized."""
        name, model = f"resize_token_embeddings of a parallelized {type(self).__name__}", self.parallel
        check(not under_ddp(model), f"{name}: it is under DistributedDataParallel; resize it before")
        for parameter, p, *_ in _tables(model):
            check(not p.is_meta, f"{name}: {parameter} is on the meta device; give it its values before")
            check(p not in PLACES, f"{name}: {parameter} has a main_grad; resize before tpfuse.MainGrad is made")
            check(
                not isinstance(p, DTensor), f"{name}: {parameter} is held by fully_shard or as_dtensor; resize before"
            )
        model.tp.chunk(count, f"{name}: new_num_tokens")
        return replace(model.config, vocab_size=count)

    def _resized(self, count: int, mean_resizing: bool) -> dict[str, tuple[Tensor, Spec]]:
        """Returns, by name, the whole tables of ``count`` rows as transformers makes them of these; a collective."""
        model, sources = self.parallel, self.parallel.files.sources()
        tables = {name: (spec, full_tensor(p, spec, tp)) for name, p, spec, tp in _tables(model)}
        stored = {model.files.hf_name(key): x for name, (_, t) in tables.items() for key, x in sources[name].write(t)}

        def resize() -> dict[str, tuple[Tensor, Spec]]:
            with torch.device("meta"):
                original: Any = self.tpfuse_original(copy.deepcopy(self.config))
            original.load_state_dict(stored, strict=False, assign=True)
            original.tie_weights()
            original.resize_token_embeddings(count, mean_resizing=mean_resizing)
            resized = NamedTensors("resize_token_embeddings", type(original).__name__, original.state_dict())
            specs = {name: replace(spec, shape=(count, *spec.shape[1:])) for name, (spec, _) in tables.items()}
            read = lambda name: sources[name].read(
                lambda key: resized.tensor(model.files.hf_name(key)), specs[name], _ALONE
            )
            return {name: (read(name), specs[name]) for name in tables}

        return together(resize, model.groups.all())


_ALONE = TensorParallel()


def _agree(groups: list[dist.ProcessGroup], values: Mapping[str, Any]) -> None:
    for group in groups:
        agree(group, Header("resize_token_embeddings", axis="tensor- and data-parallel"), values)


def _count(now: int, new: int | None, multiple: int | None) -> int:
    """Returns the number of rows that transformers would give a table of ``now``."""
    if multiple is not None:
        check_number("resize_token_embeddings: pad_to_multiple_of", multiple, COUNT)
    if new is not None:
        check_number("resize_token_embeddings: new_num_tokens", new, COUNT)
    return -(-(now if new is None else new) // (multiple or 1)) * (multiple or 1)


def _tables(model: Model) -> list[tuple[str, nn.Parameter, Spec, TensorParallel]]:
    """Returns (name, parameter, spec, tp) of every parameter with a row for each token."""
    ends: dict[str, ParallelModule] = {"embedding": model.embedding}
    if isinstance(model.head, LMHead):
        ends["head"] = model.head
    return [
        (f"{end}.{leaf}", p, spec, layer.tp)
        for end, layer in ends.items()
        for leaf, spec in layer.specs.items()
        if (p := layer.shard(leaf)) is not None
    ]


def _resize_layers(model: Model, count: int) -> None:
    model.embedding.num_embeddings, (model.embedding.first, _) = count, model.tp.chunk(count)
    if isinstance(head := model.head, LMHead):
        head.vocab_size, (head.first, head.last) = count, head.tp.chunk(count)
        head.columns = head.tp.slice_size(count)
