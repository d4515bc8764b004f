"""Models, their configurations, and their files."""

from typing import Any

from .bert import Bert
from .bert_config import BertConfig
from .classify import Classifier
from .config import GPTConfig, ModelConfig
from .gpt import GPT
from .model import Model, Output

__all__ = ["GPT", "Bert", "BertConfig", "Classifier", "GPTConfig", "Output", "config_from_hf", "with_head"]

_MODELS: tuple[type[Model], ...] = (GPT, Bert)


def with_head(config: ModelConfig, **options: Any) -> Model:
    """Returns the model of a config, with its language-model head; ``options`` are its constructor's."""
    model = next(m for m in _MODELS if m.config_class is type(config))
    return model(config, **options, **model.head_options)


def config_from_hf(config: dict[str, Any]) -> ModelConfig:
    """Returns the config of any family for the contents of a config.json.

    ValueError for an unknown model_type, a missing key or an option that is not built.
    """
    classes = (m.config_class for m in _MODELS)
    return next((c for c in classes if config.get("model_type") in c.families), GPTConfig).from_hf(config)
