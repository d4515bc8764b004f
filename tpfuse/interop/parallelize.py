"""One line for a model of transformers: its blocks become ours, its forward and outputs stay its own."""

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from ..kernels.runtime.errors import check
from ..kernels.runtime.rules import listed
from ..models.config.model import ModelConfig
from ..models.files.names import FileOrigin
from ..models.files.read import NamedTensors, load
from ..models.model import Model
from ..models.stack import FULL
from ..parallel import TensorParallel
from ..ranks.agreement import digest
from ..ranks.messages import together
from ..training.checkpoint.replicas import bits_of
from ..training.dropped import drop
from .changed import check_unchanged
from .parallelized import COUNTERPARTS, Counterpart, Parallelized, class_of, origin_of
from .peft_model import adapter_of, before_peft, in_use, is_peft_model
from .vocabulary import open_ends


def parallelize(
    module: nn.Module,
    tp: TensorParallel | None = None,
    *,
    dp: dist.ProcessGroup | DeviceMesh | None = None,
    seed: int = 0,
    saving: str | None = None,
    recompute: str | None = None,
) -> nn.Module:
    """Gives a model of transformers tpfuse's blocks, split over ``tp``, in place; returns the module.

    The module is a GPT2LMHeadModel, LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM,
    GPTNeoXForCausalLM, Phi3ForCausalLM, Starcoder2ForCausalLM, Gemma2ForCausalLM, Gemma3ForCausalLM, Olmo2ForCausalLM,
    MixtralForCausalLM, Qwen2MoeForCausalLM, Qwen3MoeForCausalLM, OlmoeForCausalLM, BertForMaskedLM or that class of a
    relative of BERT (RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT, ModernBERT), the base of one (GPT2Model, LlamaModel,
    ..., BertModel), or one of these families' ForSequenceClassification and ForTokenClassification.  Every rank calls
    it with the same weights, before the optimizer is made.  The module's own parameters are dropped; its new ones are
    this rank's shards, in their dtype and on their device, under the names of ``module.parallel``, a :class:`GPT` or
    :class:`Bert`.
    On the meta device they stay there.  A frozen parameter stays frozen, and gradient checkpointing that is enabled
    stays so, as ``recompute="full"``.

    ``forward`` takes and returns what it did: the loss, whole logits [B, S, V], collected over the ranks (M V numbers),
    and whole hidden states; a loss made of them on every rank has its whole gradient after backward.  ``use_cache`` of
    the config is ignored; an argument that is not built (a cache, attentions) is a NotImplementedError that names it.
    ``step``, ``first_sample``, ``label_smoothing``, ``z_loss`` and ``reduction`` may be given as to GPT; ``seed``,
    ``dp``, ``saving`` and ``recompute`` are GPT's: dropout is by position, its masks another stream than transformers'.
    A PeftModel of one of these with one LoRA adapter gives the module with that adapter, as trainable as it was.
    ``generate`` is GPT's, with transformers' arguments and generation_config.  ``save_pretrained`` writes full tensors
    (all ranks call it).

    ValueError for any other module, one that was changed since its config made it (a part, a dropout's probability), an
    option that is not built, heads that cannot be split, or weights that differ between ranks.
    """
    tp = TensorParallel() if tp is None else tp
    base: Any = cast(Any, module).get_base_model() if is_peft_model(module) else module
    with adapter_of(module, (tp.call_group,)) as add_adapter:
        model = _parallel(base, tp, dp=dp, seed=seed, saving=saving, recompute=recompute)
        if add_adapter is not None:
            add_adapter(model)
        together(lambda: _freeze(model, base), (tp.call_group,))
    if base is not module:
        cast(Any, module).unload()  # PEFT's layers go once nothing can fail any more
    open_ends(model)
    parts = tuple(base._modules)
    _keep_hooks(base, model)
    drop(base.parameters(), "parallelize")
    for child in parts:
        delattr(base, child)
    base.parallel = model.train(base.training)
    original: Any = type(base)
    base.__class__ = class_of(original)
    base.__dict__ |= dict(tpfuse_parts=parts, tpfuse_adapter=add_adapter is not None)
    return base


def _parallel(
    module: nn.Module,
    tp: TensorParallel,
    *,
    dp: dist.ProcessGroup | DeviceMesh | None,
    seed: int,
    saving: str | None,
    recompute: str | None,
) -> Model:
    """Returns the model of tpfuse with a module's weights; the module, whose layers PEFT may have wrapped, stays."""
    parameters = before_peft(dict(module.named_parameters(remove_duplicate=False)))
    kinds = list(dict.fromkeys((p.dtype, p.device) for p in parameters.values()))

    def examine() -> tuple[Callable[..., Model], FileOrigin, ModelConfig, str | None]:
        counterpart, origin = _counterpart(module), origin_of("parallelize", module)
        check(
            len(kinds) == 1,
            f"parallelize: parameters must have one dtype and one device, got {', '.join(map(str, kinds))}",
        )
        config = counterpart.model.config_class.from_hf(origin.config)
        check_unchanged(module)
        NamedTensors("parallelize", type(module).__name__, parameters).check_layers(config.num_layers)
        return counterpart.constructor(module), origin, config, _recompute(module, recompute)

    constructor, origin, config, recompute = together(examine, (tp.call_group,))
    dtype, device = kinds[0]
    with torch.device("meta"):
        model = constructor(config, tp=tp, dp=dp, seed=seed, saving=saving, recompute=recompute)
    tp.agree("parallelize", {"dtype": dtype})
    if device.type == "meta":
        model.to(dtype)
    else:
        cause = "call torch.manual_seed before the module is made, or load the same files"
        weights = digest([bits_of(p) for p in parameters.values()])
        tp.agree("parallelize", {f"a checksum of the weights ({cause})": weights})
        tensors = NamedTensors("parallelize", type(module).__name__, before_peft(module.state_dict()))
        load(model.files, tensors, dtype, device)
    model.origin = origin
    return model


_HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
_HOOK_OPTIONS = "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"


def _keep_hooks(module: Any, model: Model) -> None:
    """Hands hooks on the input embedding to the model's, with what removes them; warns of hooks on other parts."""
    embedding = module.get_input_embeddings()
    for key in (*_HOOKS, *_HOOK_OPTIONS):
        setattr(model.embedding, key, getattr(embedding, key))
    parts = [(name, m) for name, m in module.named_modules() if m not in (module, embedding)]
    hooked = [name for name, m in parts if any(getattr(m, key) for key in _HOOKS)]
    if hooked:
        warnings.warn(
            f"parallelize: hooks on {listed(hooked)} are gone with these parts; register them afterwards, on those of"
            " module.parallel",
            stacklevel=3,
        )


def _counterpart(module: Any) -> Counterpart:
    cls = type(module)
    check(not isinstance(module, Parallelized), f"parallelize: {cls.__name__} is parallelized already")
    check(
        cls.__module__.startswith("transformers.") and cls.__name__ in COUNTERPARTS,
        f"parallelize: module must be transformers' own {', '.join(COUNTERPARTS)}, got {cls.__module__}.{cls.__name__}",
    )
    ends = module.get_input_embeddings(), module.get_output_embeddings()
    if ends[1] is not None:
        tied, declared = ends[0].weight is ends[1].weight, bool(module.config.tie_word_embeddings)
        check(
            tied == declared,
            f"parallelize: config.tie_word_embeddings={declared}, and the module's embeddings are"
            f"{' not' * (not tied)} tied",
        )
    return COUNTERPARTS[cls.__name__]


def _recompute(module: nn.Module, recompute: str | None) -> str | None:
    """Returns the model's ``recompute``: the argument, or FULL if transformers' checkpointing is enabled."""
    layers = [m for m in module.modules() if hasattr(m, "gradient_checkpointing")]
    enabled = [m for m in layers if m.gradient_checkpointing]
    if not enabled:
        return recompute
    plain = all(getattr(m._gradient_checkpointing_func, "func", None) is checkpoint for m in enabled)
    if len(enabled) < len(layers) or not plain:
        raise NotImplementedError(
            "parallelize: gradient checkpointing of some layers only, or with offload, is not built; call"
            " gradient_checkpointing_disable() first, or gradient_checkpointing_enable() without these"
        )
    check(
        recompute in (None, FULL),
        f"parallelize: gradient checkpointing is enabled, got recompute={recompute!r} beside it",
    )
    return FULL


def _freeze(model: Model, module: nn.Module) -> None:
    """Freezes the parameters, but for adapters', that a module has frozen."""
    parameters = in_use(dict(module.named_parameters(remove_duplicate=False)))
    names = NamedTensors("parallelize", type(model).__name__, parameters).names(model.files.base_prefix)
    sources = {name: source.found_by(names) for name, source in model.files.sources().items()}
    for name, p, *_ in model.files.stored_parameters():
        trained = {parameters[names[n]].requires_grad for n in sources[name].names}
        check(
            len(trained) == 1,
            f"parallelize: {', '.join(sources[name].names)} are one parameter here; freeze all of them or none",
        )
        p.requires_grad_(trained.pop())
