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
from torch.distributed.device_mesh import DeviceMesh

from ..collectives import collect
from ..kernels.runtime.errors import check
from ..kernels.runtime.rules import brief
from ..models import GPT, Bert
from ..models.config import ModelConfig
from ..models.families import FAMILIES, Family
from ..models.model import Model
from ..parallel import TensorParallel
from ..together import together
from .huggingface.disk import NewFiles
from .huggingface.read import Tensors, load


class _Kind(NamedTuple):
    model: type[Model]
    output: str  # transformers' class
    options: Callable[[nn.Module], dict[str, Any]]  # of the model's constructor
    normalized: bool = False  # its loss divides by num_items_in_batch, where a call gives it


def _kind_of(family: Family) -> _Kind:
    model = GPT if family.causal else Bert
    return _Kind(model, family.output, lambda module: model.head_options, normalized=family.causal)


_KINDS = {family.architecture: _kind_of(family) for family in FAMILIES.values()} | {
    "BertModel": _Kind(
        Bert, "BaseModelOutputWithPoolingAndCrossAttentions", lambda module: dict(pooler=module.pooler is not None)
    ),
}
_CALL = "input_ids", "labels", "attention_mask", "position_ids", "token_type_ids", "step", "first_sample"
_GENERATE = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "repetition_penalty",
    "eos_token_id",
    "pad_token_id",
    "max_new_tokens",
)
_GENERATE_IGNORED = "bos_token_id", "transformers_version", "use_cache", "_from_model_config", "max_length"


def parallelize(
    module: nn.Module,
    tp: TensorParallel | None = None,
    *,
    dp: dist.ProcessGroup | DeviceMesh | None = None,
    seed: int = 0,
    saving: str = "fastest",
) -> nn.Module:
    """Gives a model of transformers tpfuse's blocks, split over ``tp``, in place; returns the module.

    The module is a GPT2LMHeadModel, LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, BertModel
    or BertForMaskedLM.  Every rank calls it with the same weights, before the optimizer is made.  The module's own
    parameters are dropped; its new ones are this rank's shards, in their dtype and on their device, under the names of
    ``module.parallel``, a :class:`GPT` or :class:`Bert`.  On the meta device they stay there.  A frozen parameter
    stays frozen.

    ``forward`` takes and returns what it did: the loss, and whole logits [B, S, V], collected over the ranks (M V
    numbers; a loss made of them on every rank has its whole gradient after backward).  ``use_cache`` of the config is
    ignored; an argument that is not built (a cache, embeddings as inputs, hidden states, attentions) is a
    NotImplementedError that names it.  ``step`` and ``first_sample`` may be given as to GPT; ``seed``, ``dp`` and
    ``saving`` are GPT's: dropout is by position, its masks another stream than transformers'.  ``generate`` is GPT's,
    with transformers' arguments and generation_config.  ``save_pretrained`` writes full tensors (all ranks call it).

    ValueError for any other module, an option that is not built, heads that cannot be split, or weights that differ
    between ranks.
    """
    tp = TensorParallel() if tp is None else tp

    parameters = dict(module.named_parameters(remove_duplicate=False))
    kinds = list(dict.fromkeys((p.dtype, p.device) for p in parameters.values()))

    def examine() -> tuple[_Kind, dict[str, Any], ModelConfig]:
        kind, hf_config = _kind(module), _config_of(module)
        check(
            len(kinds) == 1,
            f"parallelize: parameters must have one dtype and one device, got {', '.join(map(str, kinds))}",
        )
        config = kind.model.config_class.from_hf(hf_config)
        Tensors("parallelize", type(module).__name__, parameters).check_layers(config.num_layers)
        return kind, hf_config, config

    kind, hf_config, config = together(examine, (tp.group,))
    dtype, device = kinds[0]
    with torch.device("meta"):
        model = kind.model(config, tp=tp, dp=dp, seed=seed, saving=saving, **kind.options(module))
    tp.agree("parallelize", {"dtype": dtype})
    if device.type == "meta":
        model.to(dtype)
    else:
        cause = "call torch.manual_seed before the module is made, or load the same files"
        tp.agree("parallelize", {f"a checksum of the weights ({cause})": _checksum(parameters)})
        load(model, Tensors("parallelize", type(module).__name__, module.state_dict()), dtype, device)
    together(lambda: _freeze(model, parameters), (tp.group,))
    name = Path(getattr(module, "name_or_path", "") or "")
    model.source, model.hf_source = name if name.is_dir() else None, hf_config
    for child in list(module._modules):
        delattr(module, child)
    module.parallel = model.train(module.training)
    original: Any = type(module)
    module.__class__ = _class(original)
    return module


def _kind(module: Any) -> _Kind:
    cls = type(module)
    check(not isinstance(module, _Parallel), f"parallelize: {cls.__name__} is parallelized already")
    known = cls.__module__.startswith("transformers.") and cls.__name__ in _KINDS
    check(
        known, f"parallelize: module must be transformers' own {', '.join(_KINDS)}, got {cls.__module__}.{cls.__name__}"
    )
    ends = module.get_input_embeddings(), module.get_output_embeddings()
    if ends[1] is not None:
        tied, declared = ends[0].weight is ends[1].weight, bool(module.config.tie_word_embeddings)
        check(
            tied == declared,
            f"parallelize: config.tie_word_embeddings={declared}, and the module's embeddings are"
            f"{' not' * (not tied)} tied",
        )
    return _KINDS[cls.__name__]


def _config_of(module: Any) -> dict[str, Any]:
    """Returns what config.json would hold; ValueError for a config that cannot be written."""
    try:
        values: dict[str, Any] = json.loads(module.config.to_json_string(use_diff=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"parallelize: the config of {type(module).__name__} is no JSON: {brief(error)}") from None
    return values


def _checksum(parameters: dict[str, nn.Parameter]) -> int:
    """Returns a sum of the bits, in which the order of addition does not matter."""
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
        check(
            len(trained) == 1,
            f"parallelize: {', '.join(sources[name].names)} are one parameter here; freeze all of them or none",
        )
        p.requires_grad_(trained.pop())


# ---- what the module becomes ----


class _Parallel:
    """Stands before the class of transformers in the module's new class; ``parallel`` is the tpfuse model."""

    parallel: Model
    tpfuse_original: type
    config: Any
    generation_config: Any
    can_generate: Callable[[], bool]

    # of a model, save_checkpoint and load_checkpoint keep these too
    seed = property(lambda self: self.parallel.seed, lambda self, value: setattr(self.parallel, "seed", value))
    step = property(lambda self: self.parallel.step, lambda self, value: setattr(self.parallel, "step", value))

    def _forward(self, arguments: dict[str, Any]) -> Any:
        name, kind = self.tpfuse_original.__name__, _KINDS[self.tpfuse_original.__name__]
        return_dict, normalizer = arguments.pop("return_dict", None), arguments.pop("num_items_in_batch", None)
        call = {key: arguments.pop(key) for key in _CALL if key in arguments}
        rest = [key for key, value in arguments.items() if isinstance(value, Tensor) or value not in (None, False, 0)]
        if rest:
            raise NotImplementedError(f"{name}, parallelized: {', '.join(rest)} is not built")
        head = self.parallel.head is not None
        out = self.parallel(
            **{key: value for key, value in call.items() if value is not None},
            **(dict(return_logits=True) if head else {}),
            **(dict(loss_normalizer=normalizer) if kind.normalized and normalizer is not None else {}),
        )
        outputs = out._asdict()
        if head:
            outputs["logits"] = _whole(out.logits, self.parallel)
        outputs = {key: value for key, value in outputs.items() if value is not None}
        result = getattr(import_module("transformers.modeling_outputs"), kind.output)(**outputs)
        return result if (self.config.return_dict if return_dict is None else return_dict) else result.to_tuple()

    def generate(self, inputs: Tensor | None = None, generation_config: Any = None, **options: Any) -> Tensor:
        """Generates as GPT does, with transformers' arguments.

        ``seed`` and ``on_token`` are GPT's.  The number of new tokens must be given, here or in the generation config.
        NotImplementedError, which names it, for an argument that is not built.
        """
        if not isinstance(self.parallel, GPT):
            raise NotImplementedError(f"generate: {type(self).__name__} is not a causal model")
        ids: Tensor = options.pop("input_ids", None) if inputs is None else inputs
        ours = {key: options.pop(key) for key in ("attention_mask", "seed", "on_token") if key in options}
        config = self.generation_config if generation_config is None else generation_config
        values = {key: value for key, value in (config.to_diff_dict() | options).items() if value is not None}
        known = _GENERATE + _GENERATE_IGNORED
        unknown = [key for key, value in values.items() if key not in known and value is not False]
        if unknown:
            raise NotImplementedError(
                f"generate of a parallelized {type(self).__name__}: {', '.join(unknown)} is not built"
            )
        if "max_new_tokens" not in values:
            check("max_length" in values, "generate: give max_new_tokens or max_length")
            values["max_new_tokens"] = values["max_length"] - ids.shape[1]
        if values.get("do_sample"):
            values["top_k"] = values.get("top_k", 50) or None  # transformers' default
        return self.parallel.generate(ids, **{k: values[k] for k in _GENERATE if values.get(k) is not None}, **ours)

    def save_pretrained(
        self, save_directory: str | Path, *, state_dict: Any = None, is_main_process: bool = True
    ) -> None:
        """Writes a directory that transformers loads.

        Every rank calls it, and one writes, whatever the last two arguments are.
        """
        self.parallel.save_pretrained(save_directory)
        if self.can_generate():
            together(lambda: self._save_generation_config(Path(save_directory)), self.parallel.groups())

    def _save_generation_config(self, path: Path) -> None:
        if self.parallel.writes:
            with (new := NewFiles(path, "save_pretrained")) as folder:
                self.generation_config.save_pretrained(folder)
                new.publish()

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Raises NotImplementedError: the blocks have their own way to save memory."""
        raise NotImplementedError(
            f"gradient_checkpointing_enable of a parallelized {type(self).__name__}; saving='smallest' saves memory"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.tpfuse_original,), self.__dict__


def _whole(logits: Tensor, model: Model) -> Tensor:
    """[B, S, V/R], of which the last rank's may be narrower -> [B, S, V].

    Every rank goes on to use them in the same way, so the adjoint is a slice (collect): a sum over the ranks (gather)
    would count the loss R times.
    """
    vocab, size = model.config.vocab_size, model.tp.size
    return collect(F.pad(logits, (0, -(-vocab // size) - logits.shape[-1])), model.tp, dim=-1)[..., :vocab]


@functools.cache
def _class(original: Any) -> Any:
    """Returns a subclass by the same name, whose forward has the same signature."""
    signature = inspect.signature(original.forward)
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(signature.bind(self, *args, **kwargs).arguments)
        del arguments[next(iter(signature.parameters))]
        return self._forward(arguments | arguments.pop(rest, {}))

    own = dict(forward=forward, tpfuse_original=original, __module__=original.__module__, __doc__=original.__doc__)
    return type(original.__name__, (_Parallel, original), own)


def _again(original: type) -> nn.Module:
    cls = _class(original)
    module: nn.Module = cls.__new__(cls)
    return module
