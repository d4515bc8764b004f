"""Models, their configurations, and their files.

bert         BERT
classify     heads that classify sequences or tokens
config/      GPTConfig and BertConfig: what a model is made of
embed        rows of tokens, positions and types, below the blocks
families/    FAMILIES: an entry a file, what a model_type fixes and the keys of its config.json
files/       Hugging Face directories in and out
generation/  generation with a cache, by sampling or beam search
gpt          GPT-2, Llama and its relatives
groups       a model's process groups
head         the head over a split vocabulary
inputs       the arguments of a call, checked
model        the base of GPT and Bert: rng, agreement of the ranks, files
rotary       tables of rotary positions
rows         rows out of a batch, and back
stack        the blocks one after another, kept or recomputed
stages       the pipeline stages of a model that are on this rank
"""

from typing import Any

from .bert import Bert
from .classify import Classifier
from .config.bert import BertConfig
from .config.gpt import GPTConfig
from .config.model import ModelConfig
from .families import Family
from .gpt import GPT
from .model import Model, Output

__all__ = ["GPT", "Bert", "BertConfig", "Classifier", "GPTConfig", "Output", "config_from_hf", "with_head"]

_MODELS: tuple[type[Model], ...] = (GPT, Bert)


def head_options(family: Family) -> dict[str, Any]:
    """Returns the constructor arguments that give a model of the family its language-model head."""
    return {} if family.causal else {"masked_lm": True}


def with_head(config: ModelConfig, **options: Any) -> Model:
    """Returns the model of a config, with its language-model head; ``options`` are its constructor's."""
    model = next(m for m in _MODELS if m.config_class is type(config))
    return model(config, **options, **head_options(config.hf))


def config_from_hf(config: dict[str, Any]) -> ModelConfig:
    """Returns the config of any family for the contents of a config.json.

    ValueError for an unknown model_type, a missing key or an option that is not built.
    """
    classes = (m.config_class for m in _MODELS)
    return next((c for c in classes if config.get("model_type") in c.families), GPTConfig).from_hf(config)
