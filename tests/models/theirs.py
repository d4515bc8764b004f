"""Models of transformers in fp64, small and with nothing trivial in them: the oracles of parallelize and of the
adapters."""

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, BertModel, GPT2Config, GPT2LMHeadModel

from tests.models.exact import make_exact
from tests.models.families import experts
from tests.models.families.test_llama_like import FAMILIES, their_config

SIZES = dict(
    vocab_size=97, initializer_range=0.2
)  # 97 words split over no number of ranks, 12 heads over 1, 2, 3 and 4
BERT = dict(
    max_position_embeddings=32, hidden_size=48, num_hidden_layers=2, num_attention_heads=12, intermediate_size=84
)
GPT2 = dict(n_positions=32, n_embd=48, n_layer=2, n_head=12, n_inner=84, bos_token_id=None, eos_token_id=None)
CLASSES = {
    "gpt2": (GPT2LMHeadModel, GPT2Config, GPT2),
    "bert": (BertModel, BertConfig, BERT),
    "bert-mlm": (BertForMaskedLM, BertConfig, BERT),
}
NAMES = (*CLASSES, *FAMILIES)


def make(name: str, dtype: torch.dtype = torch.float64, seed: int = 1, **options) -> nn.Module:
    """The same on every rank; 2 kv heads in the Llama family."""
    torch.manual_seed(seed)
    if name in experts.FAMILIES:
        model = transformers.AutoModelForCausalLM.from_config(experts.their_config(name, **options))
        return experts.widen(exact(model, dtype))
    if name in CLASSES:
        cls, config, sizes = CLASSES[name]
        model = cls(config(**SIZES | sizes | options))
    else:
        model = transformers.AutoModelForCausalLM.from_config(their_config(name, 2, **options))
    return exact(model, dtype)


def exact(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Every parameter moved away from what it starts as, and every sum in ``dtype``."""
    model = model.to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    make_exact(model)
    return model


def loss_of(logits: Tensor, labels: Tensor, shift: bool) -> Tensor:
    """In the dtype of the logits: theirs is fp32."""
    labels = F.pad(labels[:, 1:], (0, 1), value=-100) if shift else labels
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
