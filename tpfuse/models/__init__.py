"""Models, their configurations, and their files."""

from ._model import Output
from .bert import Bert
from .config import BertConfig, GPTConfig
from .gpt import GPT

__all__ = ["GPT", "Bert", "BertConfig", "GPTConfig", "Output"]
