"""The base of GPT and Bert: their groups and stages, the rng of a call, agreement of the ranks, files."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import unserializable_hook

from ..kernels.losses.options import IGNORE
from ..kernels.runtime.captures import forget_captured
from ..kernels.runtime.errors import check
from ..kernels.runtime.philox import make_rng
from ..kernels.runtime.processor import order_of_sums
from ..kernels.runtime.rules import SEED, check_number
from ..layers.block import TransformerBlock
from ..layers.call import Call
from ..layers.embedding import VocabParallelEmbedding
from ..layers.expert_ranks import ExpertGroup, expert_ranks
from ..layers.hooks import hooked_within
from ..layers.module import initialize, mark_of, module_state
from ..layers.wiring import Normed
from ..parallel import TensorParallel, resolve, versions
from ..pipeline.placement import Stage
from ..pipeline.trees import apart
from ..ranks.agreement import Agreement, Header, agree_over, digest, is_checking, next_number, raise_everywhere
from ..ranks.groups import process_group
from ..ranks.messages import attempt, channel, together
from ..sequence_parallel.context import settled
from .classify import ClassifierHead
from .config.model import ModelConfig
from .embed import EmbeddingDropout
from .files.names import FileOrigin, ModelFiles
from .files.read import ModelDirectory, as_stored, load
from .files.write import save
from .groups import Groups
from .head import LMHead, ReplicatedTable
from .inputs import Inputs, check_given, check_inputs, check_tokens
from .rotary import RotaryTables, packed_positions
from .rows import BatchRows
from .stack import FULL, SELECTIVE, run_blocks, saving_of
from .stages import Batch, ModelStages

M = TypeVar("M", bound="Model")
AT_CALLS: list[Callable[["Model"], None]] = []  # done at each call of a model, once its ranks agree on it
_WHICH = "which model, in the order in which they were made"
_CAUSE = "the usual cause is a sampler over the whole world instead of over the data-parallel ranks"


class Output(NamedTuple):
    """The results of a model's call; None for one that was not requested.

    ``loss`` scalar fp32, or [B, S] with reduction="none"; ``logits`` [B, S, V/R], this rank's slice of the vocabulary.
    The same on every rank: a classifier's ``logits`` [B, L] or [B, S, L]; ``last_hidden_state`` [B, S, D],
    ``pooler_output`` [B, D], and ``hidden_states``, num_layers + 1 of [B, S, D].  ``balance_loss`` scalar fp32: the
    part of ``loss`` that keeps experts equally busy; not in it with reduction="none".
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    pooler_output: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    balance_loss: Tensor | None = None


class Model(nn.Module):
    """The base of GPT and Bert.

    Attributes:
        config: what the model is made of.
        tp: the tensor-parallel ranks.
        groups: all process groups of the model.
        stages: the pipeline stages that are here; all of a model made without ``stage``.
        files: its tensors' names in Hugging Face files.
        origin: the directory and config.json that it was read from; None for a model that was not read.
        seed: chooses the initial weights and the dropout masks.
        step: chooses the masks too: a 0-d int64 tensor, no buffer, that counts training forwards unless a call brings
            its own.
        saving: what blocks keep for backward, "fastest" or "smallest".
    """

    config_class: ClassVar[type[ModelConfig]]
    config: ModelConfig
    embedding: VocabParallelEmbedding
    blocks: nn.ModuleList
    head: LMHead | None
    classifier: ClassifierHead | None

    def __init__(
        self,
        config: ModelConfig,
        *,
        tp: TensorParallel | None = None,
        dp: dist.ProcessGroup | DeviceMesh | None = None,
        seed: int = 0,
        saving: str | None = None,
        recompute: str | None = None,
        stage: Stage | tuple[Any, ...] | None = None,
        experts: ExpertGroup | None = None,
        **options: Any,
    ):
        super().__init__()
        self.config, self.seed = config, seed
        self.origin: FileOrigin | None = None
        self.tp = settled(TensorParallel() if tp is None else tp, config.num_heads, config.kv_heads)
        name = type(self).__name__
        self.groups = Groups(self.tp, process_group(f"{name}: dp", dp, "dp"), staged=stage is not None)
        self.step = torch.zeros((), dtype=torch.int64, device="cpu")
        self._agreement = Agreement(
            Header(name, axis=self.tp.call_axis, causes=(("input_ids", _CAUSE),)), each_call=True
        )
        self._host = HostState()
        self._rope = RotaryTables(name, config)
        shared: dict[str, Any] = dict(config=config, seed=seed, saving=saving, recompute=recompute, stage=stage)
        shared |= dict(dtype=torch.get_default_dtype()) | options | {"experts given": experts is not None}
        shared |= {} if self.tp.bitwise is None else order_of_sums()
        fields = "size", "cp_size", "cp_kind", "sequence_parallel", "overlap", "bitwise", "batch_invariant"
        split: dict[str, Any] = {f"tp.{key}": getattr(self.tp, key) for key in fields}
        self._shared: dict[str, Any] = {}
        self._share(shared | split | dict(versions=versions()))
        check_number(f"{name}: seed", seed, SEED)
        self._replicas = Agreement(Header(name, axis="expert-parallel"), each_call=True)
        if experts is not None:
            self.groups.experts = expert_ranks(name, experts, self.tp)
            self._settle_experts(stage)
        self._number = next_number(self.tp.call_group)
        self.saving, self._full = saving_of(name, saving, recompute), False
        self.stages = ModelStages(name, config, stage, head=bool(options.get("lm_head") or options.get("masked_lm")))

    def _settle_experts(self, stage: Stage | tuple[Any, ...] | None) -> None:
        """Settles what gradients of experts over replicas are; ValueError in a model that cannot have them."""
        name, ranks = type(self).__name__, self.groups.experts.replica_ranks
        if self.groups.experts.replicas == 1:
            return
        dp = None if self.groups.dp is None else dist.get_process_group_ranks(self.groups.dp)
        check(
            dp == ranks,
            f"{name}: experts are divided among replicas {ranks}, got dp={dp}; give dp=mesh['dp'] and"
            " experts=mesh['dp', 'tp'] of one mesh",
        )
        if stage is not None:  # whose loss is one over all replicas
            self.groups.experts = self.groups.experts.with_divisor(1)

    def _share(self, values: Mapping[str, Any]) -> None:
        """Compares what the model is made of over its ranks and replicas, and keeps it for those of other stages, which
        are known once there is a schedule."""
        name = type(self).__name__
        calls = self.tp.call_group, Header(name, axis=self.tp.call_axis)
        agree_over([calls, (self.groups.dp, Header(name, axis="data-parallel"))], values)
        self._shared |= values

    def _make_embedding(self, scale: float | None = None) -> None:
        """Makes the embedding, where a stage here needs it."""
        c = self.config
        if self.stages.has_embedding:
            self.embedding = VocabParallelEmbedding(
                c.vocab_size, c.hidden_size, tp=self.tp, scale=scale, init_std=c.init_std
            )
        else:
            self.register_module("embedding", None)

    def _make_table(self, count: int) -> ReplicatedTable | None:
        """Returns ``count`` learned rows that are added to the embedding's; None for none, and on other stages."""
        c = self.config
        return ReplicatedTable(count, c.hidden_size, self.tp, c.init_std) if count and self.stages.has_first else None

    def _make_head(self, *, bias: bool, softcap: float | None = None) -> LMHead:
        c = self.config
        return LMHead(
            c.hidden_size, c.vocab_size, tp=self.tp, bias=bias, tied=c.tie_embeddings, init_std=c.init_std,
            softcap=softcap,
        )  # fmt: skip

    def _materialize(self) -> None:
        """Gives the modules, which were made on the meta device, storage and initial weights.

        Not where the caller's default device is meta.
        """
        device = torch.get_default_device()
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights()

    def init_weights(self) -> None:
        """Fills every parameter by the model's seed, as the constructor does: for a model that was made on the meta
        device, after ``to_empty``."""
        initialize(self, self.seed)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients, and drops what a :class:`tpfuse.KFAC` has taken of them."""
        super().zero_grad(set_to_none)
        forget_captured(self.parameters())

    # ---- what is kept for backward ----

    @property
    def recompute(self) -> str | None:
        """The part that backward computes again: "full", "selective" (which is saving="smallest") or None."""
        return FULL if self._full else SELECTIVE if self.saving == "smallest" else None

    def gradient_checkpointing_enable(self) -> None:
        """Switches to recompute="full": each block's input is kept for backward, and the block runs again.

        Gradients stay bitwise the same.  Every rank calls it.
        """
        self._choose_recompute(FULL)

    def gradient_checkpointing_disable(self) -> None:
        """Switches back to what ``saving`` says."""
        self._choose_recompute(None)

    def _choose_recompute(self, recompute: str | None) -> None:
        self._full = recompute == FULL
        for block in self.blocks:  # in a block that runs again what is cheap is made again too
            if isinstance(block, TransformerBlock):
                block.saving = "smallest" if self._full else self.saving

    def _run_blocks(self, h: Tensor, normed: Normed, batch: Batch) -> tuple[Tensor, Normed, tuple[Tensor, ...] | None]:
        """Runs the blocks -> h and n of the last, and hidden_states [B, S, D] where they are to be returned."""
        states: list[Tensor] | None = [] if batch.inputs.output_hidden_states else None
        h, normed = run_blocks(self.blocks, h, normed, states=states, full=self._full, call=batch.call)
        if states is None:
            return h, normed, None
        return h, normed, tuple(map(batch.rows.collected, (*states, normed.rows)))

    # ---- a call ----

    def _admit(self, inputs: Inputs) -> None:
        """Compares a call over the tensor-parallel ranks, and checks that it has tokens and that the model is whole."""
        self._compare("forward", inputs._asdict())
        check_given(type(self).__name__, inputs, self.config.hidden_size)
        self.stages.check_whole("a call")

    def _end(self, output: Output, step: int | Tensor | None) -> Output:
        """Ends a call: counts it, and makes its backward pass look whether another thread is in a call, and under
        ``checking()`` compare whose it is."""
        if self.tp.call_size > 1 and not torch.compiler.is_compiling():
            tensors = (x for x in (output.loss, output.logits, output.last_hidden_state) if x is not None)
            reference = next((x for x in tensors if x.requires_grad), None)
            if reference is not None:
                compared = is_checking()
                begin = unserializable_hook(lambda gradient: self._begin_backward(compared=compared))
                reference.register_hook(begin)  # which a pickled output has not
        self._count(step)
        return output

    def _begin_backward(self, *, compared: bool) -> None:
        links = channel(self.tp.call_group)
        if links is not None:
            links.threads.enter()
        if compared:
            self.tp.agree(type(self).__name__, {f"the backward pass of {_WHICH}": self._number})

    def _count(self, step: int | Tensor | None) -> None:
        """Counts a call: the last thing it does, so that one that fails has not been counted."""
        if step is None and self._drops():
            self.step += 1
            self._host.counted(self.step)

    def _targets(self, inputs: Inputs) -> Tensor | None:
        """Returns the label of each position, [B, S]; None where a call has none."""
        return inputs.labels

    def input_embeddings(self, input_ids: Tensor) -> Tensor:
        """ids int64 [B, S] -> the embedding's rows [B, S, D], whole and the same on every tensor-parallel rank.

        What ``inputs_embeds`` takes; gradients go back to the embedding.  Every rank calls it.
        """
        self.stages.check_whole("input_embeddings")
        check_tokens(type(self).__name__, input_ids)
        rows = BatchRows(input_ids.shape, self.tp)
        return rows.collected(self.embedding(rows.all(input_ids, -1)))

    def _compare(self, call: str, arguments: dict[str, Any]) -> None:
        """Compares a call over the tensor-parallel ranks, before anything of it is done; not within a graph."""
        compare = lambda: self._agree(call, arguments)
        experts = self.groups.experts
        if experts.replicas > 1 and not torch.compiler.is_compiling():
            _, error = attempt(compare)
            raise_everywhere(error, [resolve(str(experts.group_name))], call=type(self).__name__)  # which would wait
            labels = None if arguments.get("labels") is None else "some"  # of each replica others
            alike = dict(step=arguments.get("step"), labels=labels)
            self._replicas(experts.group, alike, self._modes(call), self._state, self._mark)
        elif self.tp.call_size > 1 and is_checking():
            together(compare, self.groups.all()[1:])  # replicas would wait for one that is refused
        else:
            compare()
        self._at_call()

    def _agree(self, call: str, arguments: dict[str, Any]) -> None:
        if self.tp.call_size > 1 and not torch.compiler.is_compiling():
            self._agreement(self.tp.call_group, arguments, self._modes(call), self._state, self._mark)

    def _modes(self, call: str) -> dict[str, Hashable]:
        modes = {"call": call, "training": self.training, "recompute": self.recompute}
        return modes | {"hooks inside its layers": hooked_within(self)}

    def _at_call(self) -> None:
        """Does what is to be done at each call, once all ranks agree on it."""
        for action in AT_CALLS:
            action(self)

    def _state(self) -> dict[str, Any]:
        """Returns what decides a call beside its arguments, in words."""
        return self._seed_and_step() | {_WHICH: self._number} | module_state(self)

    def _decisive_state(self, *, staged: bool) -> dict[str, Any]:
        """Returns what decides a call beside its arguments, in words; ``staged``: of that what all stages share."""
        return self._seed_and_step() if staged else self._state()

    def _seed_and_step(self) -> dict[str, int]:
        """Returns what chooses the masks of the next call, without waiting for a device."""
        return {"model.seed": self.seed, "model.step": self._host.value(self.step)}

    def _mark(self) -> Hashable:
        """Returns what changes when :meth:`_state` does."""
        return self.seed, self._host.value(self.step), self._number, self._host.digest(mark_of(self))

    def _check_inputs(self, inputs: Inputs, longest: int | None = None) -> None:
        """Checks the arguments; ``longest`` is the length of the longest packed document, where there are such."""
        checked = inputs if self.classifier is None else inputs._replace(labels=None)  # whose labels it knows itself
        check_inputs(
            type(self).__name__, checked, most=self.config.most_positions, start=self.config.first_position,
            longest=longest, device=next(self.parameters()).device,
        )  # fmt: skip
        if self.classifier is not None:
            self.classifier.check_call(inputs)

    def _normalized(self, inputs: Inputs, targets: Tensor | None) -> Inputs:
        """Returns a call whose mean, over pieces of sequences, is over the labels of whole ones, which are here."""
        if self.tp.cp is None or targets is None or inputs.reduction != "mean" or inputs.loss_normalizer is not None:
            return inputs
        return inputs._replace(loss_normalizer=(targets != IGNORE).sum().clamp(min=1))

    def _drops(self) -> bool:
        c = self.config
        classifier = 0.0 if self.classifier is None else self.classifier.p
        return self.training and max(c.dropout, c.attention_dropout, c.embedding_dropout, classifier) > 0

    def _rng(self, inputs: Inputs) -> Tensor | None:
        """Returns (seed, step, first_sample) of this call; None where nothing is dropped."""
        if not self._drops():
            return None
        return make_rng(self.seed, *self._counters(inputs, len(inputs.tokens)), inputs.tokens.device)

    def _batch(self, inputs: Inputs, longest: int | None) -> Batch:
        """Checks a call's arguments, and makes its rows and the record that all of its blocks get; ``longest`` is the
        length of the longest packed document, where there are such."""
        below: int | None = None
        if inputs.cu_seqlens is not None and inputs.position_ids is None:
            below = inputs.shape[1]
            inputs = inputs._replace(position_ids=packed_positions(inputs.cu_seqlens, below)[None])
        self._check_inputs(inputs, longest)
        rows, rng = BatchRows(inputs.shape, self.tp), self._rng(inputs)
        rope = self._rope(rows, inputs.position_ids, inputs.tokens.device, below, longest=longest if below else None)
        packed, mask = inputs.cu_seqlens, inputs.key_mask
        call = Call(rows.batch, rows.seq, rng, mask, cu_seqlens=packed, max_seqlen=longest, rope=rope)
        return Batch(inputs, rows, call)

    def _embedding_dropout(self, rows: BatchRows, rng: Tensor | None) -> EmbeddingDropout:
        return EmbeddingDropout(self.config.embedding_dropout if self.training else 0.0, rng, rows.first, rows.batch)

    def _counters(self, inputs: Inputs, batch: int) -> tuple[Any, Any]:
        step, first_sample = inputs.step, inputs.first_sample
        if not self._drops():
            return step, first_sample
        if first_sample is None:
            alone = not dist.is_initialized() or dist.get_world_size() == self.tp.call_size
            check(
                alone or self.groups.dp_rank is not None or self.groups.pp_name is not None,
                f"{type(self).__name__}: dropout is on and the world is larger than the {self.tp.call_axis} group, so"
                " replicas would share masks; give the model dp=, or the call first_sample=",
            )
            first_sample = (self.groups.dp_rank or 0) * batch
        if step is None:
            if self.step.device != inputs.tokens.device:
                before, self.step = self.step, self.step.to(inputs.tokens.device)
                self._host.moved(before, self.step)
            step = self.step
        return step, first_sample

    def _tied(self) -> Tensor | None:
        """Returns the embedding's weight where the head shares it."""
        return apart(self, self.embedding.shard("weight")) if self.config.tie_embeddings else None

    # ---- files ----

    @classmethod
    def from_pretrained(
        cls: type[M],
        path: str | Path,
        *,
        tp: TensorParallel | None = None,
        dp: dist.ProcessGroup | DeviceMesh | None = None,
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        saving: str | None = None,
        recompute: str | None = None,
        **options: Any,
    ) -> M:
        """Reads a model from a Hugging Face directory (config.json, safetensors), each rank its own slices only.

        ``dtype`` (default: torch's default dtype) is that of the parameters, whatever the files hold; "auto" is the
        directory's own, and ``torch_dtype`` the same argument by transformers' older name.  ``options`` are the
        constructor's; a ``classifier`` that the directory does not hold starts from weights drawn by ``seed``.
        A tensor that belongs to no module of the model is not read, with a warning, and where the files hold a head
        that differs from the embedding it is read, whatever ``tie_word_embeddings`` says, with a warning.
        ValueError on every rank, before anything is read, for an unknown model_type, an option that is not built, or a
        missing, mis-shaped or truncated tensor, or one more in a layer of the model.
        """
        wanted, begins = torch_dtype if dtype is None else dtype, options.get("classifier") is not None

        def examine() -> tuple[ModelDirectory, ModelConfig, dict[str, Any], torch.dtype, str]:
            files = ModelDirectory(path)
            same = torch_dtype is None or files.dtype(torch_dtype) == files.dtype(wanted)
            check(same, f"from_pretrained: dtype={dtype!r} and torch_dtype={torch_dtype!r} differ")
            config = files.read_config(cls.config_class.from_hf)
            options_read = ({} if begins else cls._options_from(files, options)) | options
            return files, config, options_read, files.dtype(wanted), files.summary()

        files, config, options, dtype, summary = together(examine, () if tp is None else (tp.call_group,))
        if tp is not None:  # the calls that follow depend on the config
            tp.agree(f"{cls.__name__}.from_pretrained", {key: str(value) for key, value in asdict(config).items()})
        if cls._has_head(options):
            config = as_stored(files, config, dtype, TensorParallel() if tp is None else tp)
        with torch.device("meta"):
            model = cls(config, tp=tp, dp=dp, seed=seed, saving=saving, recompute=recompute, **options)
        model._share({"dtype": dtype})
        fresh = ("classifier", "pooler", "transform", "transform_norm") if begins else ()
        load(model.files, files, dtype, device, seed=seed, fresh=fresh)
        model._share({"the weights in the files": summary})  # after an error that names a tensor
        model.origin = FileOrigin(Path(path), files.config)
        return model.eval()

    @property
    def files(self) -> ModelFiles:
        """The names of the model's tensors in Hugging Face files."""
        return ModelFiles(self, self.config, self.groups, self.stages, classifier=self.classifier, origin=self.origin)

    def save_pretrained(self, path: str | Path) -> None:
        """Writes a directory that transformers loads: full tensors, config.json, the tokenizer the model came with."""
        save(self.files, Path(path))

    @classmethod
    def _has_head(cls, options: Mapping[str, Any]) -> bool:
        """Returns whether the constructor makes a head over the vocabulary of these arguments."""
        return False

    @classmethod
    def _options_from(cls, files: ModelDirectory, options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the constructor arguments that a directory decides where a call's ``options`` do not."""
        return {}


class HostState:
    """What the host knows of a model without waiting for a device, so that calls can be compared by it."""

    def __init__(self) -> None:
        self._step: tuple[Tensor | None, int, int] = (None, 0, 0)  # its version, its value
        self._mark: tuple[list[Any], int] = ([], 0)

    def counted(self, step: Tensor) -> None:
        """Says that 1 was added to a counter."""
        if not torch.compiler.is_compiling():
            known, version, value = self._step
            if known is step and version + 1 == step._version:
                self._step = step, step._version, value + 1

    def moved(self, step: Tensor, to: Tensor) -> None:
        """Says that ``to`` is a copy of a counter on another device."""
        if step.is_cpu and not torch.compiler.is_compiling():
            self._step = to, to._version, int(step)

    def value(self, step: Tensor) -> int:
        """Returns a counter's value; a device is waited for only where somebody else has changed it."""
        known, version, value = self._step
        if known is not step or step._version != version:
            value = int(step)
            self._step = step, step._version, value
        return value

    def digest(self, mark: list[Any]) -> int:
        """Returns the digest of a list, the one before while the list stays equal."""
        known, number = self._mark
        if mark != known:
            self._mark = mark, (number := digest(mark))
        return number


def staged_in(model: nn.Module) -> Model | None:
    """Returns the model in ``model``, or itself, of which only some stages are here; None where there is none."""
    return next((m for m in model.modules() if isinstance(m, Model) and m.stages.place is not None), None)
