"""The families of models: one table, an entry a file of this folder."""

from .bert import BERT
from .distilbert import DISTILBERT
from .family import NO_WINDOW, ONE_WINDOW, PER, SEQUENCE, TOKEN, WINDOWED_LAYERS, Classes, Family, Head
from .gpt2 import GPT2
from .llama import LLAMA
from .mistral import MISTRAL
from .modernbert import MODERNBERT
from .qwen import QWEN2, QWEN3
from .roberta import CAMEMBERT, ROBERTA, XLM_ROBERTA

__all__ = [
    "CAUSAL", "ENCODERS", "FAMILIES", "NO_WINDOW", "ONE_WINDOW", "PER", "SEQUENCE", "TOKEN", "WINDOWED_LAYERS",
    "Classes", "Family", "Head",
]  # fmt: skip

FAMILIES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "bert": BERT,
    "roberta": ROBERTA,
    "xlm-roberta": XLM_ROBERTA,
    "camembert": CAMEMBERT,
    "distilbert": DISTILBERT,
    "modernbert": MODERNBERT,
}
CAUSAL = tuple(name for name, family in FAMILIES.items() if family.causal)
ENCODERS = tuple(name for name, family in FAMILIES.items() if not family.causal)
