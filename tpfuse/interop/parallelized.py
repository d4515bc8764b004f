"""The class that a module of transformers gets: its own, with tpfuse's forward, generate and files."""

import functools
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from ..kernels.runtime.errors import check
from ..kernels.runtime.rules import brief
from ..layers.hooks import served
from ..layers.lora import adapted_layers, add_lora
from ..layers.shards import named_specs
from ..models import GPT, Bert, Classifier, head_options
from ..models.families import FAMILIES, SEQUENCE, Family
from ..models.files.disk import NewFiles
from ..models.files.names import FileOrigin
from ..models.files.read import NamedTensors, restore
from ..models.files.write import save
from ..models.generation.options import DEFAULTS, settled
from ..models.inputs import Inputs
from ..models.model import Model, Output
from ..models.stack import FULL
from ..ranks.messages import together
from .adapter import load_adapter, save_adapter
from .arguments import ForwardSignature
from .body import Body
from .documents import Documents
from .lora_config import lora_arguments
from .vocabulary import Vocabulary, gathered, whole_logits


class Counterpart(NamedTuple):
    """The model of a class of transformers, the class of its outputs, and the model's constructor for a module."""

    model: type[Model]
    output: str
    constructor: Callable[[Any], Callable[..., Model]]


def _with_head(family: Family) -> Counterpart:
    model = GPT if family.causal else Bert
    return Counterpart(model, family.output, lambda module: partial(model, **head_options(family)))


def _classifier(family: Family, per: str, output: str) -> Counterpart:
    model = GPT if family.causal else Bert
    classifier = lambda module: Classifier.from_hf(module.config.to_dict(), family, per)
    return Counterpart(model, output, lambda module: partial(model, classifier=classifier(module)))


def _without_head(family: Family) -> Counterpart:
    if not family.causal:
        output = _BASE_OUTPUTS[family.output] if family.pooler else "BaseModelOutput"
        pooler = lambda module: getattr(module, "pooler", None) is not None
        return Counterpart(Bert, output, lambda module: partial(Bert, pooler=pooler(module)))
    return Counterpart(GPT, _BASE_OUTPUTS[family.output], lambda module: partial(GPT, lm_head=False))


_BASE_OUTPUTS = {  # what a class with a head returns -> what its class without one does
    "CausalLMOutputWithPast": "BaseModelOutputWithPast",
    "MoeCausalLMOutputWithPast": "MoeModelOutputWithPast",
    "CausalLMOutputWithCrossAttentions": "BaseModelOutputWithPastAndCrossAttentions",
    "MaskedLMOutput": "BaseModelOutputWithPoolingAndCrossAttentions",
}
COUNTERPARTS = {family.architecture: _with_head(family) for family in FAMILIES.values()}
COUNTERPARTS |= {family.base_architecture: _without_head(family) for family in FAMILIES.values()}
COUNTERPARTS |= {
    head.architecture: _classifier(family, per, head.output)
    for family in FAMILIES.values()
    for per, head in family.classes.items()
}
_CALL = (
    "input_ids",
    "inputs_embeds",
    "labels",
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "step",
    "first_sample",
)
_LOSS = "label_smoothing", "z_loss", "reduction"  # of a model that has one
_TABLES = "embedding", "positions", "types"  # what transformers has in nn.Embedding
_LANGUAGE = "shift_labels", "logits_to_keep"  # of a causal one with a head over the vocabulary
_CURES = {
    "use_cache": "generate keeps a cache; leave it out",
    "past_key_values": "generate keeps a cache; give all tokens",
}
_CHECKPOINT_IGNORED = "use_reentrant", "preserve_rng_state"  # nothing depends on them
# Arguments of generate that no generation config has.
_OBJECTS: tuple[str, ...] = "attention_mask", "logits_processor", "stopping_criteria", "tokenizer", "streamer"
_OBJECTS += "seed", "on_token", "on_prompt", "cuda_graph", "return_log_probs", "assistant_model"
_SAVE_IGNORED = "safe_serialization", "save_function", "token", "save_peft_format", "save_original_format"


class Parallelized(Vocabulary, nn.Module):
    """First base of the module's new class, before transformers' own; ``parallel`` is the tpfuse model."""

    parallel: Model
    tpfuse_original: type
    tpfuse_outputs: Mapping[str, Any]  # the class of what a call returns, by transformers' class
    tpfuse_parts: tuple[str, ...] = ()  # of the module that are no more
    tpfuse_adapter = False  # True after add_adapter, load_adapter or of a PeftModel: save_pretrained writes the adapter
    tpfuse_driver = False  # True in a TrainerMixin, which knows the split
    config: Any
    generation_config: Any
    can_generate: Callable[[], bool]

    # of a model, save_checkpoint and load_checkpoint keep these too
    seed = property(lambda self: self.parallel.seed, lambda self, value: setattr(self.parallel, "seed", value))
    step = property(lambda self: self.parallel.step, lambda self, value: setattr(self.parallel, "step", value))

    @property
    def tp_size(self) -> None:
        """None: transformers has not split it.  transformers' Trainer and accelerate read this first.

        ValueError if they read it of a module that is split or has replicas, unless TrainerMixin drives it: they would
        take each rank for a replica of their own.
        """
        check(
            self.tpfuse_driver or all(group.size() == 1 for group in self.parallel.groups.all()),
            f"{type(self).__name__} is split by tpfuse.parallelize; train it with class Trainer(tpfuse.TrainerMixin,"
            " transformers.Trainer), or class Accelerator(tpfuse.AcceleratorMixin, accelerate.Accelerator)",
        )

    @property
    def base_model(self) -> nn.Module:
        """The model below the head, or this one where it has none: see :class:`Body`."""
        return self if self.parallel.head is None and self.parallel.classifier is None else Body(self)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("tpfuse_parts", ()):
            raise AttributeError(
                f"{type(self).__name__}.{name} is not there after tpfuse.parallelize, whose layers are in .parallel:"
                " base_model is the model below the head, get_input_embeddings() and get_output_embeddings() are its"
                " ends"
            )
        return super().__getattr__(name)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Returns the number of the whole model's parameters, the same at every split."""
        tables = [f"parallel.{name}.weight" for name in _TABLES] if exclude_embeddings else []
        return sum(
            math.prod(spec.shape)
            for name, p, spec, _ in named_specs(self)
            if name not in tables and (p.requires_grad or not only_trainable)
        )

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads the module's own shards, or whole tensors by transformers' names, of which each rank keeps its slices.

        ValueError if one of the whole tensors is missing, extra or mis-shaped.
        """
        if all(name.startswith("parallel.") for name in state_dict):
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        restore(self.parallel.files, NamedTensors("load_state_dict", "state_dict", state_dict))
        return nn.Module().load_state_dict({})

    def _forward(self, arguments: MutableMapping[str, Any], body: str | None = None) -> Any:
        """Runs a call; ``body``: the base class whose output comes, that below the head."""
        self._follow_config()
        name = body or self.tpfuse_original.__name__
        return_dict, normalizer = arguments.pop("return_dict", None), arguments.pop("num_items_in_batch", None)
        if isinstance(normalizer, Tensor) or normalizer == 0:  # a call without labels has the loss 0, not 0 / 0
            normalizer = normalizer + (normalizer == 0)
        head, classifier = (part is not None and not body for part in (self.parallel.head, self.parallel.classifier))
        causal = isinstance(self.parallel, GPT)
        names = _CALL + _LOSS * (head or classifier) + _LANGUAGE * (head and causal)
        call = {key: arguments.pop(key) for key in names if key in arguments}
        call |= dict(output_hidden_states=self._wants_states(arguments), loss_normalizer=normalizer)
        call |= dict(headless=True) if body else {}
        arguments.setdefault("output_attentions", getattr(self.config, "output_attentions", False))
        cached = arguments.get("use_cache")
        cached = getattr(self.config, "use_cache", False) if cached is None else cached
        cached = cached and not (self.training and self.gradient_checkpointing)
        unsupported = [
            key for key, value in arguments.items() if isinstance(value, Tensor) or value not in (None, False, 0)
        ]
        if unsupported:
            cures = [f"; {_CURES[key]}" for key in unsupported if key in _CURES]
            raise NotImplementedError(f"{name}, parallelized: {', '.join(unsupported)} is not built{''.join(cures)}")
        ids, embedding = call.get("input_ids"), self.parallel.embedding
        # a hook on the embedding gets [B, S, D]
        if isinstance(ids, Tensor) and ids.dim() == 2 and served(embedding) and gathered(embedding):
            check(call.get("inputs_embeds") is None, f"{name}: give input_ids or inputs_embeds, both came")
            call |= dict(input_ids=None, inputs_embeds=embedding(ids))
        if head:
            call["return_logits"] = True
        call = {key: value for key, value in call.items() if value is not None}
        positions, tokens = call.get("position_ids"), call.get("inputs_embeds", ids)
        if isinstance(positions, Tensor) and isinstance(tokens, Tensor) and positions.shape[:1] == (1,):  # for all rows
            call["position_ids"] = positions.expand(tokens.shape[0], *positions.shape[1:])
        if causal:
            outputs = self._decode(Inputs(**call), by_positions=not cached)
        else:
            outputs = self.parallel(**call)
        if head and outputs.logits is not None:
            logits = whole_logits(outputs.logits, self.parallel.config.vocab_size, self.parallel.tp)
            outputs = outputs._replace(logits=logits)
        values = {key: value for key, value in outputs._asdict().items() if value is not None}
        balance = values.pop("balance_loss", None)
        if balance is not None and self.config.router_aux_loss_coef:  # transformers gives it without its factor
            values["aux_loss"] = balance / self.config.router_aux_loss_coef
        result = self.tpfuse_outputs[name](**values)
        return result if (self.config.return_dict if return_dict is None else return_dict) else result.to_tuple()

    def _decode(self, inputs: Inputs, by_positions: bool) -> Output:
        """Calls the GPT; ``by_positions``: position_ids that begin again are documents, as in transformers."""
        if inputs.shift_labels is not None:
            inputs = inputs._replace(labels=None)
        if isinstance(inputs.logits_to_keep, int) and inputs.logits_to_keep == 0:
            inputs = inputs._replace(logits_to_keep=None)
        documents, classifier = None, None if inputs.headless else self.parallel.classifier
        if by_positions and inputs.attention_mask is None:
            documents = Documents.of(inputs, shifts=self.parallel.head is not None)
        if documents is None:
            return self.parallel(**inputs._asdict())
        check(
            classifier is None or classifier.classifier.per != SEQUENCE,
            f"{type(self).__name__}: position_ids begin again, which packs several documents into a row, and one label"
            " is that of a row; give documents padded, each a row with an attention_mask",
        )
        return documents.unpacked(self.parallel(**documents.packed()._asdict()))

    def _follow_config(self) -> None:
        """Gives a head per sequence what transformers reads of the config in each call: users and trainers set it
        later."""
        head = self.parallel.classifier
        if head is not None and head.classifier.per == SEQUENCE:
            pad = self.config.get_text_config().pad_token_id if isinstance(self.parallel, GPT) else None
            present = replace(head.classifier, problem_type=self.config.problem_type, pad_token_id=pad)
            if present != head.classifier:
                head.classifier = present

    def _wants_states(self, arguments: MutableMapping[str, Any]) -> bool:
        """Takes output_hidden_states out of the arguments; its default is the config's."""
        key = "output_hidden_states"
        wanted = arguments.pop(key) if key in arguments else getattr(self.config, key, False)
        if wanted is not None and not isinstance(wanted, bool):
            raise NotImplementedError(
                f"{type(self).__name__}, parallelized: {key}={wanted!r}, a choice of layers, is not built; give True"
                " and index hidden_states"
            )
        if wanted and getattr(self.config, "tie_last_hidden_states", None) is False:
            raise NotImplementedError(
                f"{type(self).__name__}, parallelized: tie_last_hidden_states=False is not built; the last of"
                " hidden_states is behind the final norm"
            )
        return bool(wanted)

    def generate(self, inputs: Tensor | None = None, generation_config: Any = None, **options: Any) -> Any:
        """Generates as GPT does, with transformers' arguments.

        Defaults come from ``generation_config``, then from the module's own generation config, then from transformers;
        ``seed``, ``on_token``, ``on_prompt``, ``cuda_graph`` and ``return_log_probs`` are GPT's.  Without an
        ``attention_mask`` pad tokens of the prompts are padding, unless the pad token is an end token too.
        NotImplementedError, which names it, for an argument that is not built.
        """
        if not isinstance(self.parallel, GPT) or self.parallel.head is None:
            raise NotImplementedError(f"generate: {type(self).__name__} is not a causal model with a head over tokens")
        ids: Tensor = options.pop("input_ids", None) if inputs is None else inputs
        ours = {key: options.pop(key) for key in _OBJECTS if key in options}
        configs = dict(top_k=DEFAULTS["top_k"]), self.generation_config, generation_config
        values = together(
            lambda: settled(options, *(config for config in configs if config is not None)),
            (self.parallel.tp.call_group,),
        )
        for key in {"eos_token_id", "pad_token_id"} & values.keys():
            if isinstance(values[key], Tensor | np.ndarray):
                values[key] = values[key].tolist()
        if ours.get("attention_mask") is None:
            ours["attention_mask"] = _mask_of(ids, values.get("pad_token_id"), values.get("eos_token_id"))
        return self.parallel.generate(ids, **ours | values)

    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: Any = None,
        *,
        max_shard_size: int | str | None = None,
        **options: Any,
    ) -> None:
        """Writes a directory that transformers loads; after add_adapter, one of the adapter alone that PEFT loads.

        config.json is the module's present config, but for what the weights decide.  Every rank calls it, and one
        writes, whatever ``is_main_process`` and ``state_dict`` are.  ``max_shard_size``: bytes, or "5GB".  ValueError,
        on every rank and before anything is written, for a config that is no JSON.  NotImplementedError for a push to
        the hub, a variant, or another option that is not built.
        """
        unsupported = [name for name, value in options.items() if value and name not in _SAVE_IGNORED]
        unsupported += ["safe_serialization=False"] if options.get("safe_serialization") is False else []
        if unsupported:
            raise NotImplementedError(
                f"save_pretrained of {type(self).__name__}: {', '.join(unsupported)} is not built"
            )
        if self.tpfuse_adapter and any(not lora.merged for *_, lora in adapted_layers(self)):
            if self.tpfuse_resized:
                warnings.warn(
                    "save_pretrained: an adapter's files hold no rows of the vocabulary, which was resized; to keep"
                    " these, save_pretrained before add_adapter, or after tpfuse.merge_lora",
                    stacklevel=2,
                )
            save_adapter(self, save_directory)
            return
        self.parallel.origin = together(self._origin, self.parallel.groups.all())
        save(self.parallel.files, Path(save_directory), _bytes(max_shard_size))
        if self.can_generate():
            together(lambda: self._save_generation_config(Path(save_directory)), self.parallel.groups.all())

    def _origin(self) -> FileOrigin:
        """Returns the module's own directory and present config, which its files are to have."""
        self._follow_config()
        model = self.parallel
        if isinstance(model, Bert) and not model.config.positions_skip_padding:  # no position depends on it
            model.config = replace(model.config, pad_token_id=self.config.pad_token_id)
        return origin_of("save_pretrained", self)

    def _save_generation_config(self, path: Path) -> None:
        if self.parallel.groups.writes:
            with (new := NewFiles(path, "save_pretrained")) as folder:
                self.generation_config.save_pretrained(folder)
                new.publish()

    # ---- recompute, by transformers' own methods ----

    @property
    def gradient_checkpointing(self) -> bool:
        """True if blocks run again in backward; transformers' is_gradient_checkpointing reads it."""
        return self.parallel.recompute == FULL

    def gradient_checkpointing_enable(
        self,
        gradient_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Switches to recompute="full": only each block's input is saved for backward, and the block runs again.

        Gradients stay bitwise the same.  Every rank calls it.  ``use_reentrant`` and ``preserve_rng_state`` change
        nothing here; NotImplementedError for another option of torch's checkpoint, for some layers only, and for
        ``offload``.
        """
        options = gradient_checkpointing_kwargs or {}
        unsupported = [key for key in options if key not in _CHECKPOINT_IGNORED]
        unsupported += [f"every_n_layers={every_n_layers}"] * (every_n_layers != 1) + ["offload"] * bool(offload)
        if unsupported:
            raise NotImplementedError(
                f"gradient_checkpointing_enable of a parallelized {type(self).__name__}: {', '.join(unsupported)} is"
                " not built; without it each block's input is kept, and tpfuse.parallelize(saving='smallest') keeps"
                " more"
            )
        self.parallel.gradient_checkpointing_enable()

    def gradient_checkpointing_disable(self) -> None:
        """Switches back to ``saving`` of tpfuse.parallelize.  Every rank calls it."""
        self.parallel.gradient_checkpointing_disable()

    # ---- adapters, by transformers' own methods ----

    def add_adapter(self, adapter_config: Any, adapter_name: str | None = None) -> None:
        """Adds the adapters of a LoraConfig of PEFT, by :func:`tpfuse.add_lora`; call it before making the optimizer.

        Everything else is frozen.  ValueError for an option that is not built, or a second adapter.
        """
        check(adapter_name in (None, "default"), f"add_adapter: one adapter, named 'default', got {adapter_name!r}")
        arguments = together(
            lambda: lora_arguments(adapter_config, self.parallel, self.config.model_type), self.parallel.groups.all()
        )
        rank, alpha, dropout, targets = arguments
        add_lora(self, rank=rank, alpha=alpha, dropout=dropout, targets=targets)
        self.tpfuse_adapter = True

    def load_adapter(self, peft_model_id: str | Path, *, is_trainable: bool = False) -> None:
        """Adds the adapter of a directory that PEFT wrote, by :func:`tpfuse.load_adapter`."""
        load_adapter(self, peft_model_id, trainable=is_trainable)
        self.tpfuse_adapter = True

    @property
    def peft_config(self) -> Any:
        """Raises ValueError: PEFT reads it before it changes anything, and wraps layers by class, not these."""
        raise ValueError(
            f"{type(self).__name__} is parallelized, and PEFT cannot wrap its layers; in place of get_peft_model(model,"
            " config) write model.add_adapter(config), and in place of PeftModel.from_pretrained(model, path),"
            " model.load_adapter(path); model.save_pretrained(path) then writes the adapter's files"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _new_module, (self.tpfuse_original,), self.__dict__


def origin_of(caller: str, module: Any) -> FileOrigin:
    """Returns the directory that a module came from, and the contents of its config.json; ValueError of ``caller`` for
    a config that cannot be written."""
    try:
        config = json.loads(module.config.to_json_string(use_diff=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{caller}: the config of {type(module).__name__} is no JSON: {brief(error)}") from None
    name = getattr(module, "name_or_path", None)  # "" of a module that was made in memory
    return FileOrigin(Path(name) if name and Path(name).is_dir() else None, config)


def _bytes(size: int | str | None) -> int | None:
    """Returns the bytes of a size as transformers writes it: 1000, "5GB", "200MiB"."""
    if size is None or (isinstance(size, int) and size > 0):
        return size
    match = re.fullmatch(r"(\d+)([KMG])(i?)B", str(size), re.IGNORECASE)
    check(match is not None, f"save_pretrained: max_shard_size must be bytes or as '5GB', got {size!r}")
    assert match is not None
    return int(match[1]) * (1024 if match[3] else 1000) ** ("KMG".index(match[2].upper()) + 1)


def _mask_of(ids: Any, pad: Any, ends: Any) -> Tensor | None:
    """Returns the attention mask that transformers' generate makes of prompts; None if no token is padding."""
    ends = ends if isinstance(ends, list | tuple) else [ends]
    if not isinstance(ids, Tensor) or not isinstance(pad, int) or pad in ends:
        return None
    mask = ids != pad
    return None if mask.all() else mask


@functools.cache
def class_of(original: Any) -> Any:
    """Returns a subclass by the same name, whose forward has the same signature."""
    signature = ForwardSignature.of(original)

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._forward(signature.bind(self, args, kwargs))

    module = import_module("transformers.modeling_outputs")
    outputs = {name: getattr(module, counterpart.output) for name, counterpart in COUNTERPARTS.items()}
    members = dict(
        forward=forward, tpfuse_original=original, tpfuse_outputs=outputs, __module__=original.__module__,
        __doc__=original.__doc__,
    )  # fmt: skip
    return type(original.__name__, (Parallelized, original), members)


def _new_module(original: type) -> nn.Module:
    cls = class_of(original)
    return cls.__new__(cls)


def parallelized_in(model: nn.Module | None) -> Parallelized | None:
    """Returns the parallelized module in ``model``, which may be wrapped; None if there is none."""
    modules = () if model is None else model.modules()
    return next((m for m in modules if isinstance(m, Parallelized)), None)
