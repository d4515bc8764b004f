"""One line for a model of transformers: its blocks become ours, its forward and outputs stay its own."""

import functools
import inspect
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .collectives import collect
from .kernels._op import check
from .models import GPT, Bert, BertConfig, GPTConfig
from .models._model import Model
from .models.config import FAMILIES
from .models.huggingface import Tensors, load, together
from .parallel import TensorParallel


class _Kind(NamedTuple):
    model: type[Model]
    output: str  # transformers' class
    options: Callable[[nn.Module], dict[str, Any]] = lambda module: {}
    normalizer: str | None = "num_items_in_batch"  # what its loss divides by, where a call says it


_CAUSAL = _Kind(GPT, "CausalLMOutputWithPast")
_KINDS = {family.architecture: _CAUSAL for family in FAMILIES.values()} | {
    "GPT2LMHeadModel": _CAUSAL._replace(output="CausalLMOutputWithCrossAttentions"),
    "BertModel": _Kind(Bert, "BaseModelOutputWithPoolingAndCrossAttentions", lambda module: dict(pooler=module.pooler is not None)),
    "BertForMaskedLM": _Kind(Bert, "MaskedLMOutput", lambda module: dict(masked_lm=True), normalizer=None),
}
_CALL = "input_ids", "labels", "attention_mask", "position_ids", "token_type_ids", "step", "first_sample"
_GENERATE = "do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "eos_token_id", "pad_token_id", "max_new_tokens"
_GENERATE_IGNORED = "bos_token_id", "transformers_version", "use_cache", "_from_model_config", "max_length"


def parallelize(
    module: nn.Module,
    tp: TensorParallel | None = None,
    *,
    dp: "dist.ProcessGroup | dist.DeviceMesh | None" = None,
    seed: int = 0,
    saving: str = "fastest",
) -> nn.Module:
    """Gives a model of transformers (GPT2LMHeadModel, LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, BertModel
    or BertForMaskedLM) tpfuse's blocks, split over ``tp``, in place; returns the module.

    Every rank calls it with the same weights, before the optimizer is made.  The module's own parameters are let go; those it has now are
    this rank's shards, in their dtype and on their device, under the names of ``module.parallel``, a :class:`GPT` or :class:`Bert`.  On the
    meta device they stay there.  A frozen parameter stays frozen.

    ``forward`` takes and returns what it did: the loss, and whole logits [B, S, V], collected over the ranks (M V numbers; a loss made of
    them on every rank has its whole gradient after backward).  ``use_cache`` of the config is ignored; what is asked for and not built (a
    cache, embeddings as inputs, hidden states, attentions) is a NotImplementedError that names it.  ``step`` and ``first_sample`` may be
    given as to GPT, ``seed``, ``dp`` and ``saving`` are GPT's: dropout is by position, its masks another stream than transformers'.
    ``generate`` is GPT's, with transformers' arguments and generation_config.  ``save_pretrained`` writes full tensors (all ranks call it).

    ValueError for any other module, an option that is not built, heads that cannot be split, or weights that differ between ranks.
    """
    tp = TensorParallel() if tp is None else tp

    parameters = dict(module.named_parameters(remove_duplicate=False))
    placed = list(dict.fromkeys((p.dtype, p.device) for p in parameters.values()))

    def look() -> tuple[_Kind, dict[str, Any], GPTConfig | BertConfig]:
        kind, hf_config = _kind(module), json.loads(module.config.to_json_string(use_diff=False))
        check(len(placed) == 1, f"parallelize: parameters must have one dtype and one device, got {', '.join(map(str, placed))}")
        return kind, hf_config, kind.model.config_class.from_hf(hf_config)

    kind, hf_config, config = together(look, (tp.group,))
    dtype, device = placed[0]
    with torch.device("meta"):
        model = kind.model(config, tp=tp, dp=dp, seed=seed, saving=saving, **kind.options(module))
    tp.agree("parallelize: dtype", dtype)
    if device.type == "meta":
        model.to(dtype)
    else:
        cause = "call torch.manual_seed before the module is made, or load the same files"
        tp.agree(f"parallelize: a checksum of the weights ({cause})", _checksum(parameters))
        load(model, Tensors("parallelize", type(module).__name__, module.state_dict()), dtype, device)
    together(lambda: _freeze(model, parameters), (tp.group,))
    name = Path(getattr(module, "name_or_path", "") or "")
    model.source, model.hf_source = name if name.is_dir() else None, hf_config
    for child in list(module._modules):
        delattr(module, child)
    module.parallel = model.train(module.training)
    module.__class__ = _class(type(module))
    return module


def _kind(module: nn.Module) -> _Kind:
    cls = type(module)
    check(not isinstance(module, _Parallel), f"parallelize: {cls.__name__} is parallelized already")
    known = cls.__module__.startswith("transformers.") and cls.__name__ in _KINDS
    check(known, f"parallelize: module must be transformers' own {', '.join(_KINDS)}, got {cls.__module__}.{cls.__name__}")
    ends = module.get_input_embeddings(), module.get_output_embeddings()
    if ends[1] is not None:
        tied, said = ends[0].weight is ends[1].weight, bool(module.config.tie_word_embeddings)
        check(tied == said, f"parallelize: config.tie_word_embeddings={said}, and the module's embeddings are{' not' * (not tied)} tied")
    return _KINDS[cls.__name__]


def _checksum(parameters: dict[str, Tensor]) -> int:
    """A sum of the bits, whose order does not matter."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    total = 0
    for i, p in enumerate(parameters.values(), 1):
        total += i * int(p.detach().contiguous().view(bits[p.element_size()]).sum(dtype=torch.int64))
    return total


def _freeze(model: Model, parameters: dict[str, nn.Parameter]) -> None:
    names = Tensors("parallelize", type(model).__name__, parameters).names(model.base_prefix)
    sources = model.sources()
    for name, p in model.named_parameters():
        trained = {parameters[names[n]].requires_grad for n in sources[name].names}
        check(len(trained) == 1, f"parallelize: {', '.join(sources[name].names)} are one parameter here; freeze all of them or none")
        p.requires_grad_(trained.pop())


# ---- what the module becomes ----


class _Parallel:
    """Before the class of transformers in the module's new class; ``parallel`` is the model of ours."""

    parallel: Model
    tpfuse_original: type

    # what save_checkpoint and load_checkpoint keep of a model
    seed = property(lambda self: self.parallel.seed, lambda self, value: setattr(self.parallel, "seed", value))
    step = property(lambda self: self.parallel.step, lambda self, value: setattr(self.parallel, "step", value))

    def _forward(self, given: dict[str, Any]) -> Any:
        name, kind = self.tpfuse_original.__name__, _KINDS[self.tpfuse_original.__name__]
        return_dict, normalizer = given.pop("return_dict", None), given.pop("num_items_in_batch", None)
        call = {key: given.pop(key) for key in _CALL if key in given}
        asked = [key for key, value in given.items() if isinstance(value, Tensor) or value not in (None, False, 0)]
        if asked:
            raise NotImplementedError(f"{name}, parallelized: {', '.join(asked)} is not built")
        head = self.parallel.head is not None
        out = self.parallel(
            **{key: value for key, value in call.items() if value is not None},
            **(dict(return_logits=True) if head else {}),
            **(dict(loss_normalizer=normalizer) if kind.normalizer and normalizer is not None else {}),
        )
        found = out._asdict()
        if head:
            found["logits"] = _whole(out.logits, self.parallel)
        found = {key: value for key, value in found.items() if value is not None}
        result = getattr(import_module("transformers.modeling_outputs"), kind.output)(**found)
        return result if (self.config.return_dict if return_dict is None else return_dict) else result.to_tuple()

    def generate(self, inputs: Tensor | None = None, generation_config: Any = None, **options: Any) -> Tensor:
        """GPT's own, with transformers' arguments; one that is not built is a NotImplementedError that names it.

        ``seed`` and ``on_token`` are GPT's.  The number of new tokens must be said, here or in the generation config.
        """
        if not isinstance(self.parallel, GPT):
            raise NotImplementedError(f"generate: {type(self).__name__} is not a causal model")
        inputs = options.pop("input_ids", None) if inputs is None else inputs
        ours = {key: options.pop(key) for key in ("attention_mask", "seed", "on_token") if key in options}
        said = (self.generation_config if generation_config is None else generation_config).to_diff_dict() | options
        said = {key: value for key, value in said.items() if value is not None}
        odd = [key for key, value in said.items() if key not in _GENERATE + _GENERATE_IGNORED and value is not False]
        if odd:
            raise NotImplementedError(f"generate of a parallelized {type(self).__name__}: {', '.join(odd)} is not built")
        if "max_new_tokens" not in said:
            check("max_length" in said, "generate: give max_new_tokens or max_length")
            said["max_new_tokens"] = said["max_length"] - inputs.shape[1]
        if said.get("do_sample"):
            said["top_k"] = said.get("top_k", 50) or None  # transformers' default
        return self.parallel.generate(inputs, **{key: said[key] for key in _GENERATE if said.get(key) is not None}, **ours)

    def save_pretrained(self, save_directory: str | Path, *, state_dict: Any = None, is_main_process: bool = True) -> None:
        """A directory that transformers loads.  Every rank calls it, and one writes, whatever the last two arguments are."""
        self.parallel.save_pretrained(save_directory)
        if self.can_generate() and self.parallel.tp.rank == 0 and not self.parallel.dp_rank:
            self.generation_config.save_pretrained(save_directory)

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"gradient_checkpointing_enable of a parallelized {type(self).__name__}; saving='smallest' saves memory")

    def __reduce__(self):
        return _again, (self.tpfuse_original,), self.__dict__


def _whole(logits: Tensor, model: Model) -> Tensor:
    """[B, S, V/R], of which the last rank's may be narrower -> [B, S, V].  Every rank goes on to use them in the same way, so the adjoint
    is a slice (collect): a sum over the ranks (gather) would count the loss R times."""
    vocab, size = model.config.vocab_size, model.tp.size
    return collect(F.pad(logits, (0, -(-vocab // size) - logits.shape[-1])), model.tp, dim=-1)[..., :vocab]


@functools.cache
def _class(original: type) -> type:
    """A subclass by the same name, whose forward has the same signature."""
    signature = inspect.signature(original.forward)
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)

    @functools.wraps(original.forward)
    def forward(self, *args, **kwargs):
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        del given[next(iter(signature.parameters))]
        return self._forward(given | given.pop(rest, {}))

    own = dict(forward=forward, tpfuse_original=original, __module__=original.__module__, __doc__=original.__doc__)
    return type(original.__name__, (_Parallel, original), own)


def _again(original: type) -> nn.Module:
    cls = _class(original)
    return cls.__new__(cls)
