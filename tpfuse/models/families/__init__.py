"""The families of models: one table, an entry a file of this folder.

bert           BERT
bert_like      the common part of BERT and its relatives
defaults       reads defaults.json
defaults.json  what transformers takes for a missing key, as python -m bench.defaults writes it
distilbert     DistilBERT
family         the fields of an entry
gemma          Gemma 2 and 3
gpt2           GPT-2
gpt_neox       GPT-NeoX and Pythia
llama          Llama
llama_like     the common part of Llama and its relatives
mistral        Mistral
mixtral        Mixtral
modernbert     ModernBERT
names          building blocks for the names of parameters in a file
olmo           OLMo 2 and OLMoE
phi3           Phi-3 and Phi-4-mini
qwen           Qwen 2, Qwen 3, Qwen2-MoE and Qwen3-MoE
roberta        RoBERTa, XLM-RoBERTa and CamemBERT
starcoder2     StarCoder2
"""

from .bert import BERT
from .defaults import DEFAULTS
from .distilbert import DISTILBERT
from .family import (
    FULL,
    NO_WINDOW,
    ONE_WINDOW,
    PATTERNED_LAYERS,
    PER,
    SEQUENCE,
    SLIDING,
    SWITCHED_WINDOW,
    TOKEN,
    WINDOWED_LAYERS,
    Classes,
    Family,
    HeadLayers,
)  # fmt: skip
from .gemma import GEMMA2, GEMMA3
from .gpt2 import GPT2
from .gpt_neox import GPT_NEOX
from .llama import LLAMA
from .mistral import MISTRAL
from .mixtral import MIXTRAL
from .modernbert import MODERNBERT
from .olmo import OLMO2, OLMOE
from .phi3 import PHI3
from .qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from .roberta import CAMEMBERT, ROBERTA, XLM_ROBERTA
from .starcoder2 import STARCODER2

__all__ = [
    "CAUSAL", "ENCODERS", "FAMILIES", "FULL", "NO_WINDOW", "ONE_WINDOW", "PATTERNED_LAYERS", "PER", "SEQUENCE",
    "SLIDING", "SWITCHED_WINDOW", "TOKEN", "WINDOWED_LAYERS", "Classes", "Family", "HeadLayers",
]  # fmt: skip

_ENTRIES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "gpt_neox": GPT_NEOX,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "phi3": PHI3,
    "starcoder2": STARCODER2,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "olmo2": OLMO2,
    "olmoe": OLMOE,
    "qwen2": QWEN2,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "bert": BERT,
    "roberta": ROBERTA,
    "xlm-roberta": XLM_ROBERTA,
    "camembert": CAMEMBERT,
    "distilbert": DISTILBERT,
    "modernbert": MODERNBERT,
}
FAMILIES = {name: entry._replace(**DEFAULTS.get(name, {})) for name, entry in _ENTRIES.items()}
CAUSAL = tuple(name for name, family in FAMILIES.items() if family.causal)
ENCODERS = tuple(name for name, family in FAMILIES.items() if not family.causal)
