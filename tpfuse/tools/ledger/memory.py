"""Memory of training: activations saved for backward, in closed form and measured, and the state of parameters.

Saved bytes per layer at 16 bit with dropout on (s positions, b micro-batch, h width, a heads, t tensor-parallel size):

    Korthikanti et al. 2022 (arXiv:2205.05198)         tpfuse (softmax statistics and vectors apart)
    no parallelism          sbh (34 + 5as/h)           fastest    sbh (8 + 24/t)     with SP  32 sbh/t
    TP                      sbh (10 + 24/t + 5as/ht)   smallest   sbh (4 + 16/t)     with SP  20 sbh/t
    TP + SP                 sbh/t (34 + 5as/h)
    TP, selective           sbh (10 + 24/t)
    TP + SP, selective      34 sbh/t
    full recompute          2 sbh                      full       2 sbh                with SP  2 sbh/t

The terms behind these are kept apart below, so that other dtypes, grouped heads and gated MLPs have their formula too.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...kernels.norm import KINDS
from ...layers.block import SAVING
from ...layers.expert_sizes import ExpertSizes
from ...layers.module import local
from ...layers.shards import same_on_replicas
from ...layers.wiring import INNER, Branch, Join, norm_names, steps_at
from ...models.config.model import ModelConfig
from ...training.kfac.optimizer import weights_of
from ...training.matrices import matrices_in
from .shapes import Shape, check_imbalance

RECOMPUTE = "none", "selective", "full", *SAVING


class Wired(NamedTuple):
    """Counts of a block inside its stack, of the steps in :data:`tpfuse.layers.wiring.WIRINGS`.

    ``streams``: values of the residual stream that a norm or a branch reads.  ``norms`` of the stream, and
    ``branch_norms``.  ``enters``: the block reads a norm of the stream, not the stream itself; ``mlp_norm``: so does
    the MLP.
    """

    streams: int
    norms: int
    branch_norms: int
    enters: bool
    mlp_norm: bool

    @classmethod
    def of(cls, config: ModelConfig) -> "Wired":
        """Returns the counts of a model's blocks."""
        steps = steps_at(config.wiring, INNER)
        joins = [step for step in steps if isinstance(step, Join)]
        before = next(step for step in steps if not isinstance(step, Branch) and step.to == "mlp")
        branch_norms = sum(join.branch_norm is not None for join in joins)
        return cls(
            streams=sum(join.to is not None for join in joins),
            norms=len(list(norm_names(steps))) - branch_norms,
            branch_norms=branch_norms,
            enters=joins[-1].norm is not None and not joins[-1].stream,
            mlp_norm=before.norm is not None and not (isinstance(before, Join) and before.stream),
        )


def activation_bytes(
    config: ModelConfig,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    *,
    seq: int,
    batch: int,
    element_size: int = 2,
    full: bool = False,
    imbalance: float = 1.0,
    replicas: int = 1,
    layer: int | None = None,
) -> float:
    """Returns the bytes that one layer saves on one rank.

    ``recompute``: "none", "selective" (attention's probabilities) or "full" for a plain layer with dropout on;
    "fastest" or "smallest" for tpfuse's, ``full`` where its blocks are recomputed (recompute="full" of a model).
    Ranks that share a kv head save its keys and values each, and in tpfuse's layer their projections' weights, put
    together.  ``imbalance``: of a model with experts, the busiest rank's rows over the mean; the bytes are that rank's.
    ``replicas``: how many the experts are divided among.  ``layer``: which layer, of a model where some have an MLP and
    some experts.  ValueError for another, for an imbalance that the ranks cannot have, for a plain layer of experts,
    and for a layer that is not there or not given where layers differ.
    """
    if recompute not in RECOMPUTE:
        raise ValueError(f"activation_bytes: recompute must be one of {', '.join(RECOMPUTE)}, got {recompute!r}")
    check_imbalance("activation_bytes", config, imbalance, tp, replicas=replicas)
    s, e, rows, wired = Shape.of(config, layer).over(tp), element_size, seq * batch, Wired.of(config)
    if s.experts is not None and recompute not in SAVING:
        raise ValueError(
            f"activation_bytes: recompute={recompute!r} is of a plain layer, which has one MLP; of experts, use one of"
            f" {', '.join(SAVING)}"
        )
    t = tp
    shards = t if sequence_parallel else 1  # of the rows between GEMMs
    if recompute == "full":
        return e * rows * s.D
    if recompute in SAVING:
        streams = 1 if recompute == "smallest" else 2  # a norm's input, and its output n where it is not recomputed
        a = 0 if recompute == "smallest" else s.F
        norm = 8 if KINDS[config.norm].centred else 4  # its statistics
        if full:  # the residual stream, and the statistics that n is recomputed from, unless the stream is n itself
            return rows * (e * s.D + (norm if wired.enters else 0)) / shards
        rowwise = wired.streams * e * s.D + wired.norms * ((streams - 1) * e * s.D + norm)
        rowwise += wired.branch_norms * (e * s.D + norm)
        inside = e * (s.qkv + s.H * s.E) + 4 * s.H + _qk_norms(config, s, e, t)
        joined = e * s.qkv * s.D / t if t > config.kv_heads else 0
        if s.experts is None:
            return rows * (rowwise / shards + (inside + e * (s.ffn_in + a)) / t) + joined
        if t > shards:  # of the rows that experts read a rank keeps its share
            rowwise -= (streams - 1 if wired.mlp_norm else 1) * e * s.D
            inside += e * s.D
        experts = ExpertSizes(s.experts, rows / t, t * replicas, e, imbalance=imbalance, replicas=replicas)
        return rows * (rowwise / shards + inside / t) + joined + experts.saved(kept=recompute == "fastest")
    # sums of the residual stream, masks of dropout; each norm's output, of a branch's norm its input
    rowwise = (2 * (e + 1) + (wired.norms + wired.branch_norms) * e) * s.D
    inside = e * (s.qkv + s.H * s.E + s.ffn_in + s.F) + _qk_norms(config, s, e, t)
    scores = (2 * e + 1) * s.H * seq if recompute == "none" else 0
    return rows * (rowwise / shards + (inside + scores) / t)


def _qk_norms(config: ModelConfig, s: Shape, e: int, t: int) -> float:
    """Returns the bytes a row of what norms of queries and keys save, over all ranks: their inputs, and a number a
    head, or each of all heads together, which every rank has."""
    together = getattr(config, "qk_norm_all", False)
    return config.qk_norm * (e * (s.H + s.G) * s.E + 4 * (2 * t if together else s.H + s.G))


@contextlib.contextmanager
def saved_bytes(model: nn.Module | None = None, apart: Iterable[Tensor] = ()) -> Iterator[Callable[[], int]]:
    """Measures what a forward keeps for backward: each storage once, not counted the model's own parameters and those
    of ``apart``.

        with saved_bytes(model) as saved:
            loss = model(ids, labels=ids).loss
        print(saved())

    Meta tensors will do.
    """
    excluded = {local(p).untyped_storage()._cdata for p in (*apart, *([] if model is None else model.parameters()))}
    storages: dict[int, torch.UntypedStorage] = {}  # held, so that no address comes twice
    total: int | None = None

    def pack(t: Tensor) -> Tensor:
        storage = local(t).untyped_storage()
        storages[storage._cdata] = storage
        return t

    def count() -> int:
        return sum(storage.nbytes() for key, storage in storages.items() if key not in excluded)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        try:
            yield lambda: count() if total is None else total
        finally:
            total = count()
            storages.clear()  # backward may free them


# ---- state of parameters ----


BY_ELEMENTS: dict[str, Callable[[int], int]] = {  # bytes an element, from the parameter's own
    "sgd": lambda size: 0,
    "adamw": lambda size: 2 * size,  # torch's: both moments in the parameter's dtype
    "adamw-fp32": lambda size: 8 + (4 if size < 4 else 0),  # both moments and a master copy in fp32
}
WHOLE = "muon", "kfac"  # whole on every rank; other parameters are AdamW's
OPTIMIZERS = *BY_ELEMENTS, *WHOLE


def _of_matrices(model: nn.Module, optimizer: str, size: Callable[[int], int]) -> dict[nn.Parameter, int]:
    """Returns the bytes of the optimizer's state, whole on every rank, of each weight that it takes as a matrix."""
    if optimizer == "muon":  # momentum, and the gradient that was gathered
        found = matrices_in(getattr(model, "blocks", model))
        each = lambda p, m: math.prod(m.spec.shape) * size(p.element_size()) * (1 + (m.tp.size > 1))
        return {p: each(p, m) for _, p, m in found if p.requires_grad}
    if optimizer == "kfac":  # momentum, two factors and their inverses, in fp32
        found = matrices_in(model, only=weights_of(model))
        shapes = {p: (m.spec.shape, max(4, p.element_size())) for _, p, m in found}
        return {p: (N * K + 2 * (N * N + K * K)) * each for p, ((N, K), each) in shapes.items()}
    return {}


class StateBytes(NamedTuple):
    """Bytes that a rank holds apart from activations.

    ``buckets``: DDP's copies of the gradients, none under tpfuse.data_parallel; ``gathered``: the two largest units
    that FSDP has whole at a time.
    """

    parameters: int
    gradients: int
    optimizer: int
    buckets: int = 0
    gathered: int = 0

    @property
    def total(self) -> int:
        return sum(self)


def state_bytes(
    model: nn.Module,
    *,
    dp: int = 1,
    sharded: bool = False,
    optimizer: str = "adamw",
    main_grad: bool = False,
    bucket_views: bool = False,
) -> StateBytes:
    """Returns the bytes of this rank's shard of a model.

    The model is replicated under DDP or, with ``sharded``, split by FSDP2 (each parameter by its first dimension).
    ``optimizer``: "sgd", "adamw" (torch's, states in the parameters' dtype), "adamw-fp32" (fp32 states and a master
    copy), "muon" (of the blocks' matrices) or "kfac" (:class:`tpfuse.KFAC`), with "adamw" for the other parameters;
    ValueError for the last two with ``sharded``, and where they refuse the model.  ``main_grad``: under
    tpfuse.MainGrad, with gradients of 4 bytes, no buckets, and fp32 weights that the optimizer steps on beside 16-bit
    parameters; ValueError with ``sharded``.  ``bucket_views``: under tpfuse.data_parallel, where the gradients lie in
    DDP's buckets, and are not held twice.  Frozen parameters have no gradients, states and buckets.  Experts
    that are divided among the replicas are in no bucket and are not sharded.
    """
    if main_grad and sharded:
        raise ValueError("state_bytes: main_grad is of a replicated model, and sharded is set")
    if sharded and optimizer in WHOLE:
        raise ValueError(f"state_bytes: {optimizer} needs whole matrices, and sharded is set")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"state_bytes: optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    parameters = list(model.parameters())
    experts = set(parameters) - set(same_on_replicas(model))
    share = lambda p: -(-len(p) // dp) * math.prod(p.shape[1:]) if sharded and p not in experts else p.numel()
    trained = [p for p in parameters if p.requires_grad]
    bytes_of = lambda size: sum(share(p) * size(p.element_size()) for p in trained)
    handled = lambda module: sum(p.numel() * p.element_size() for p in module.parameters() if p not in experts)
    blocks = getattr(model, "blocks", [])  # None where another pipeline rank holds it
    units = [handled(block) for block in blocks if block is not None]
    ends = handled(model) - sum(units)
    gathered = sum(sorted([*units, ends])[-2:]) if sharded and dp > 1 else 0
    buckets = sum(p.numel() * p.element_size() for p in trained if p not in experts)
    widened = lambda size: max(size, 4) if main_grad else size
    master = lambda size: 4 if main_grad and size < 4 else 0
    matrices = _of_matrices(model, optimizer, widened)
    by_elements = BY_ELEMENTS.get(optimizer, BY_ELEMENTS["adamw"])
    states = sum(share(p) * by_elements(widened(p.element_size())) for p in trained if p not in matrices)
    return StateBytes(
        parameters=sum(share(p) * p.element_size() for p in parameters),
        gradients=bytes_of(widened),
        optimizer=states + sum(matrices.values()) + bytes_of(master),
        buckets=0 if dp == 1 or sharded or main_grad or bucket_views else buckets,
        gathered=gathered,
    )


def parameter_count(config: ModelConfig, tp: int = 1, *, replicas: int = 1) -> float:
    """Returns the parameters of one rank, with a language-model head, in closed form.

    Matrices, experts, biases before the split, and the embedding are divided by tp, the rest is replicated; of fewer kv
    heads than tp each rank has a copy of one.
    ``replicas``: how many the experts are divided among too.  For GPT-2 at tp = 1: V h + s h + L (12 h^2 + 13 h) + 2 h.
    """
    c, D, V = config, config.hidden_size, config.vocab_size
    norm = 2 * D if KINDS[c.norm].centred and c.norm_bias else D
    layers = sum(s.L * _layer_parameters(c, s.over(tp), norm, (tp, tp * replicas)) for s in Shape.kinds(c))
    vocabulary = V * D * (1 if c.tie_embeddings else 2)
    ends = (c.learned_positions + c.type_vocab_size) * D + norm
    if not c.hf.causal:  # the masked-LM head's bias, its transform and the norm of that
        vocabulary += V
        ends += D * D + getattr(c, "head_bias", True) * D + norm
    return vocabulary / tp + layers + ends


def _layer_parameters(c: ModelConfig, s: Shape, norm: int, ranks: tuple[int, int]) -> float:
    """Returns the parameters of a layer on one of the ranks that divide matrices, and of those that divide experts."""
    wired, tp, of_experts = Wired.of(c), *ranks
    inside = s.weights + c.qkv_bias * s.qkv + c.mlp_bias * s.ffn_in
    replicated = (wired.norms + wired.branch_norms) * norm + c.out_bias * s.D + c.mlp_bias * s.D + s.router
    if s.experts is not None and s.experts.routing.biased:
        replicated += s.experts.num_experts
    if getattr(c, "qk_norm_all", False):
        inside += c.qk_norm * (s.H + s.G) * s.E
    else:
        replicated += c.qk_norm * 2 * s.E
    return inside / tp + s.expert_weights / of_experts + replicated
