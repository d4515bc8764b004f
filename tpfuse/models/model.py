"""What every model shares: its inputs, the rng of a call, agreement of the ranks, files."""

from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..kernels.runtime.errors import check
from ..kernels.runtime.philox import make_rng
from ..layers.block import Normed, TransformerBlock
from ..layers.embedding import VocabParallelEmbedding
from ..layers.hooks import hooked_within
from ..layers.module import initialize, local, module_state
from ..parallel import TensorParallel, resolve, versions
from ..pipeline.placement import Stage
from ..ranks.agreement import Agreement, Header, agree
from ..ranks.messages import together
from .classify import ClassifierHead
from .config.gpt import ModelConfig
from .files.read import Files, load
from .head import LMHead
from .inputs import Inputs, check_given, check_inputs, check_tokens
from .rows import Rows
from .stack import FULL, SELECTIVE, run_blocks, saving_of
from .staged import StagedModel

M = TypeVar("M", bound="Model")
_CAUSE = "the usual cause is a sampler over the whole world instead of over the data-parallel ranks"


class Output(NamedTuple):
    """What a model returns; what was not asked for is None.

    ``loss`` scalar fp32, or [B, S] with reduction="none"; ``logits`` [B, S, V/R], this rank's slice of the vocabulary.
    The same on every rank: a classifier's ``logits`` [B, L] or [B, S, L]; ``last_hidden_state`` [B, S, D],
    ``pooler_output`` [B, D], and ``hidden_states``, num_layers + 1 of [B, S, D].
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    pooler_output: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class Model(StagedModel):
    """The base of GPT and Bert.

    ``step`` counts training forwards (a 0-d int64 tensor, no buffer) unless a call brings its own.
    """

    config_class: ClassVar[type[ModelConfig]]
    refused: ClassVar[dict[str, str]] = {}  # inputs that the model does not take, and what is said of them
    head_options: ClassVar[dict[str, Any]] = {}  # constructor arguments that give it a language-model head
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
        **options: Any,
    ):
        super().__init__()
        self.config, self.seed, self.source, self.hf_source = config, seed, None, None
        self.tp = TensorParallel() if tp is None else tp
        dp = dp.get_group() if dp is not None and not isinstance(dp, dist.ProcessGroup) else dp
        self.dp_rank = None if dp is None else dp.rank()
        self.dp_group_name: str | None = None if dp is None else dp.group_name
        self.step = torch.zeros((), dtype=torch.int64, device="cpu")
        name = type(self).__name__
        self._agreement = Agreement(Header(name, causes=(("input_ids", _CAUSE),)), each_call=True)
        shared: dict[str, Any] = dict(config=config, seed=seed, saving=saving, recompute=recompute, stage=stage)
        shared["dtype"] = torch.get_default_dtype()
        self.tp.agree(name, shared | options)
        shared |= dict(sequence_parallel=self.tp.sequence_parallel, overlap=self.tp.overlap, versions=versions())
        agree(dp, Header(name, axis="data-parallel"), shared | options)
        self.saving, self._full = saving_of(name, saving, recompute), False
        self._place(stage, head=bool(options.get("lm_head") or options.get("masked_lm")))

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

    def groups(self) -> list[dist.ProcessGroup]:
        names = self.tp.group_name, self.dp_group_name, self.pp_group_name
        return [resolve(name) for name in names if name is not None]

    # ---- what is kept for backward ----

    @property
    def recompute(self) -> str | None:
        """What backward computes again: "full", "selective" (which is saving="smallest") or None."""
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

    def _run_blocks(self, h: Tensor, normed: Normed, states: list[Tensor] | None, **call: Any) -> tuple[Tensor, Normed]:
        """Through the blocks; ``states`` gets what enters each, and the last's n."""
        h, normed = run_blocks(self.blocks, h, normed, states=states, full=self._full, **call)
        if states is not None:
            states.append(normed.rows)
        return h, normed

    # ---- a call ----

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        loss_normalizer: float | Tensor | None = None,
        step: int | Tensor | None = None,
        first_sample: int | Tensor | None = None,
        return_logits: bool | None = None,
        output_hidden_states: bool | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        reduction: str = "mean",
    ) -> Output:
        """input_ids int64 [B, S], the same on every tensor-parallel rank -> Output.

        Args:
            input_ids: token ids.
            inputs_embeds: in their place, rows [B, S, D] as the embedding would give them, whole and the same on every
                tensor-parallel rank; so is their gradient.
            labels: int64 [B, S], aligned with input_ids; -100 is ignored.  GPT shifts them (never across a packed
                document's bound), Bert and classifiers do not; per sequence [B], or numbers [B, L].
            attention_mask: bool or integer [B, S], nonzero where a token may be seen.
            position_ids: int64 [B, S]; default: 0, 1, ... in each sequence, and in each packed document.
            token_type_ids: int64 [B, S], of a Bert with token types; default 0.
            cu_seqlens: int32 [N + 1], GPT's and ModernBERT's alone: the bounds of packed documents, 0 first, with B =
                1.  No document sees another; what lies beyond the last is padding.
            max_seqlen: the longest document, which max_positions limits (not S).
            loss_normalizer: divides the summed loss; default: the valid labels of this call.
            step: chooses the dropout masks; default: the model's counter.
            first_sample: chooses the dropout masks too; default: dp rank x B.
            return_logits: logits [B, S, V/R] come where there are no labels, or where this is true.
            output_hidden_states: hidden_states come, [B, S, D] each, collected over the ranks: the embedding's output,
                then each block's, the last behind the final norm.
            label_smoothing: the share of the target that is spread over the whole vocabulary, in [0, 1).
            z_loss: the weight of the squared logsumexp that is added to the loss.
            reduction: "mean", "sum", or "none" for the loss of each label, [B, S], aligned with ``labels``: that of
                labels[b, s] stands at [b, s], 0 where it counts nothing (GPT: at a sequence's first token too).

        ValueError, on every rank, for an input that the model does not take or that is not as above.
        """
        inputs = Inputs(
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            labels=labels,
            attention_mask=attention_mask,
            position_ids=position_ids,
            token_type_ids=token_type_ids,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            loss_normalizer=loss_normalizer,
            step=step,
            first_sample=first_sample,
            return_logits=return_logits,
            output_hidden_states=output_hidden_states,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            reduction=reduction,
        )
        self._compare("forward", inputs._asdict())
        for name, reason in self.refused.items():
            check(getattr(inputs, name) is None, f"{type(self).__name__}: {reason}")
        check_given(type(self).__name__, inputs, self.config.hidden_size)
        output = self._run(inputs)
        if inputs.step is None and self._drops():  # last, so that a call that fails has not been counted
            self.step += 1
        return output

    def input_embeddings(self, input_ids: Tensor) -> Tensor:
        """ids int64 [B, S] -> the embedding's rows [B, S, D], whole and the same on every tensor-parallel rank.

        What ``inputs_embeds`` takes; gradients go back to the embedding.  Every rank calls it.
        """
        self.check_whole("input_embeddings")
        check_tokens(type(self).__name__, input_ids)
        rows = Rows(input_ids.shape, self.tp)
        return rows.whole(self.embedding(rows.all(input_ids, -1)))

    def _compare(self, call: str, arguments: dict[str, Any]) -> None:
        """Compares a call over the tensor-parallel ranks, before anything of it is done."""
        if self.tp.size > 1:
            modes = {"call": call, "training": self.training, "recompute": self.recompute}
            modes["hooks inside its layers"] = hooked_within(self)
            self._agreement(self.tp.group, arguments, modes, lambda: module_state(self))

    def _run(self, inputs: Inputs) -> Output:
        self.check_whole("a call")
        call = self._begin(inputs)
        h, normed = self._embedded(call)
        states: list[Tensor] | None = [] if inputs.output_hidden_states else None
        h, normed = self._run_blocks(h, normed, states, **call.blocks)
        return self._finish(h, normed, call, None if states is None else tuple(map(call.rows.whole, states)))

    def _check_inputs(self, inputs: Inputs, longest: int | None = None) -> None:
        """Checks the arguments; ``longest`` is the length of the longest packed document, where there are such."""
        given = inputs if self.classifier is None else inputs._replace(labels=None)  # whose labels it knows itself
        limits: dict[str, Any] = dict(most=self.config.max_positions, first=self.config.first_position, longest=longest)
        check_inputs(type(self).__name__, given, **limits, device=next(self.parameters()).device)
        if self.classifier is not None:
            self.classifier.check_call(inputs)

    def _drops(self) -> bool:
        """Whether a call drops anything."""
        c = self.config
        own = 0.0 if self.classifier is None else self.classifier.p
        return self.training and max(c.dropout, c.attention_dropout, c.embedding_dropout, own) > 0

    def _rng(self, inputs: Inputs) -> Tensor | None:
        """Returns (seed, step, first_sample) of this call; None where nothing is dropped."""
        if not self._drops():
            return None
        return make_rng(self.seed, *self._counters(inputs, len(inputs.tokens)), inputs.tokens.device)

    def _counters(self, inputs: Inputs, batch: int) -> tuple[Any, Any]:
        step, first_sample = inputs.step, inputs.first_sample
        if not self._drops():
            return step, first_sample
        if first_sample is None:
            alone = not dist.is_initialized() or dist.get_world_size() == self.tp.size
            check(
                alone or self.dp_rank is not None or self.pp_group_name is not None,
                f"{type(self).__name__}: dropout is on and the world is larger than the tensor-parallel group, so"
                " replicas would share masks; give the model dp=, or the call first_sample=",
            )
            first_sample = (self.dp_rank or 0) * batch
        if step is None:
            if self.step.device != inputs.tokens.device:
                self.step = self.step.to(inputs.tokens.device)
            step = self.step
        return step, first_sample

    def counted(self, arguments: dict[str, Any]) -> None:
        """Counts a step over a pipeline, as ``forward`` counts its own."""
        if arguments.get("step") is None and self._drops():
            self.step += 1

    def _tied(self) -> Tensor | None:
        """Returns the embedding's weight where the head shares it."""
        return local(self.embedding.weight) if self.config.tie_embeddings else None

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
        ValueError on every rank, before anything is read, for an unknown model_type, an option that is not built, or a
        missing, extra, mis-shaped or truncated tensor.
        """
        asked, begins = torch_dtype if dtype is None else dtype, options.get("classifier") is not None

        def examine() -> tuple[Files, ModelConfig, dict[str, Any], torch.dtype]:
            files = Files(path)
            same = torch_dtype is None or files.dtype(torch_dtype) == files.dtype(asked)
            check(same, f"from_pretrained: dtype={dtype!r} and torch_dtype={torch_dtype!r} differ")
            config = files.read_config(cls.config_class.from_hf)
            return files, config, ({} if begins else cls._options_from(files)) | options, files.dtype(asked)

        files, config, options, dtype = together(examine, () if tp is None else (tp.group,))
        with torch.device("meta"):
            model = cls(config, tp=tp, dp=dp, seed=seed, saving=saving, recompute=recompute, **options)
        model.tp.agree(cls.__name__, {"dtype": dtype})
        model.fresh = ("classifier", "pooler", "transform", "transform_norm") * begins
        load(model, files, dtype, device)
        model.source, model.hf_source = Path(path), files.config
        return model.eval()

    @classmethod
    def _options_from(cls, files: Files) -> dict[str, Any]:
        """Returns the constructor arguments that the tensors in a directory decide."""
        return {}
