"""The encoders of transformers that Bert loads, small and in fp64, and what a step of them gives: values and
gradients by the names of a file."""

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.models.modernbert import modeling_modernbert

from tests.common import error, make_tp
from tests.models import theirs
from tests.models.common import body_loss, gradients, whole_logits
from tpfuse.models import Bert

F64, L, PAD, WORDS = torch.float64, 3, 1, 97
KINDS = {
    "base": transformers.AutoModel,
    "mlm": transformers.AutoModelForMaskedLM,
    "sequence": transformers.AutoModelForSequenceClassification,
    "token": transformers.AutoModelForTokenClassification,
}
# 97 words split over no number of ranks, 12 heads and 84 columns over 1, 2 and 4
SIZES: dict[str, Any] = dict(vocab_size=WORDS, max_position_embeddings=32, pad_token_id=PAD, num_labels=L)
SIZES |= dict(initializer_range=0.2, bos_token_id=None, eos_token_id=None)
NAMED = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=12, intermediate_size=84)
NO_TOKENS = dict(cls_token_id=None, sep_token_id=None)
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "roberta": (transformers.RobertaConfig, NAMED | dict(type_vocab_size=1, hidden_act="relu")),
    "xlm-roberta": (transformers.XLMRobertaConfig, NAMED | dict(type_vocab_size=1)),
    "distilbert": (transformers.DistilBertConfig, dict(dim=48, n_layers=2, n_heads=12, hidden_dim=84)),
    "modernbert": (
        transformers.ModernBertConfig,
        NAMED | dict(num_hidden_layers=3, local_attention=4, global_attn_every_n_layers=2) | NO_TOKENS,
    ),
    "modernbert-biased": (
        transformers.ModernBertConfig,
        NAMED
        | dict(local_attention=6, layer_types=["sliding_attention", "full_attention"], classifier_pooling="mean")
        | dict(hidden_activation="silu", classifier_activation="silu")
        | dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), True)
        | NO_TOKENS,
    ),
    "camembert": (transformers.CamembertConfig, NAMED | dict(type_vocab_size=2)),
}


def _rotated(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Any:
    """ModernBERT's rotation in the dtype of what it rotates; its own is in fp32."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return tuple(x * cos + modeling_modernbert.rotate_half(x) * sin for x in (q, k))


modeling_modernbert.apply_rotary_pos_emb = _rotated


def make(family: str, kind: str, **options: Any) -> Any:
    """A model of transformers in which nothing is trivial, and padding's row has its gradient."""
    cls, sizes = FAMILIES[family]
    torch.manual_seed(1)
    model: Any = theirs.exact(KINDS[kind].from_config(cls(**SIZES | sizes | options)), F64)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
    return model


def batch(kind: str, pad: str | None = "right", size: int = 3, seq: int = 7) -> dict[str, Any]:
    """A call, padded on one side to unequal lengths; a token of padding stands where it is seen, too."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(PAD + 1, WORDS, (size, seq), generator=g)
    length = seq - torch.arange(size)[:, None] * 2
    mask = torch.arange(seq) < length if pad == "right" else torch.arange(seq) >= seq - length
    if pad is None:
        mask = torch.ones_like(mask)
    ids = ids.masked_fill(~mask, PAD)
    ids[0, 2] = PAD
    call = dict(input_ids=ids, attention_mask=mask.long())
    if kind == "sequence":
        call["labels"] = torch.randint(L, (size,), generator=g)
    elif kind != "base":
        labels = torch.randint(L if kind == "token" else WORDS, ids.shape, generator=g)
        call["labels"] = labels.masked_fill(~mask | (torch.rand(ids.shape, generator=g) < 0.2), -100)
    return call


def want(model: Any, kind: str, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Of a model of transformers; the loss in fp64, since theirs may be fp32."""
    model.zero_grad()
    out = model(**{key: x for key, x in call.items() if key != "labels"})
    if kind == "base":
        found = dict(hidden=out.last_hidden_state, pooled=getattr(out, "pooler_output", None))
        found["loss"] = _body_loss(found, call)
    else:
        loss = F.cross_entropy(out.logits.flatten(0, -2), call["labels"].flatten())
        found = dict(logits=out.logits, loss=loss)
    found["loss"].backward()
    found = {key: x.detach() for key, x in found.items() if x is not None}
    names: dict[Any, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):  # what is tied has the name of what it is tied to
        names[p] = names.get(p, name) if "decoder." in name or name == "vocab_projector.weight" else name
    return found | {name: p.grad for p, name in names.items() if p.grad is not None}


def _body_loss(found: dict[str, Any], call: dict[str, Any]) -> torch.Tensor:
    pooled = found["hidden"][:, 0] if found["pooled"] is None else found["pooled"]
    return body_loss(found["hidden"], pooled, call["attention_mask"])


def step(model: Any, kind: str, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What ``want`` gives, of a model of tpfuse."""
    out = model(**call, **(dict(return_logits=True) if kind == "mlm" else {}))
    if kind == "base":
        found = dict(hidden=out.last_hidden_state, pooled=out.pooler_output)
        found["loss"] = _body_loss(found, call)
    else:
        logits = whole_logits(out.logits, WORDS, model.tp) if kind == "mlm" else out.logits
        found = dict(logits=logits, loss=out.loss)
    found["loss"].backward()
    found = {key: x.detach() for key, x in found.items() if x is not None}
    return found | gradients(model)


def run(world: Any, folder: Any, kind: str, sp: bool, call: dict[str, Any], **options: Any) -> dict[str, torch.Tensor]:
    tp = None if world is None else make_tp(world, sp)
    return step(Bert.from_pretrained(folder, tp=tp, dtype=F64, **options), kind, call)


def close(got: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    """Returns the relative errors, at most 1e-10; "d " stands before a gradient's name."""
    idle = got.keys() - exact.keys()  # untied, transformers keeps the bias of the head twice
    assert not idle or (idle == {"lm_head.bias"} and exact.keys() <= got.keys()), idle
    assert exact.keys() <= got.keys(), exact.keys() - got.keys()
    blind = lambda key: key.endswith(("key.bias", "k_lin.bias"))  # softmax does not see it: its gradient is rounding
    errors = {}
    for key, x in exact.items():
        assert got[key].shape == x.shape, key
        name = key if key in ("loss", "logits", "hidden", "pooled") else f"d {key}"
        errors[name] = (got[key] - x).abs().max().item() if blind(key) else error(got[key], x)
    assert max(errors.values()) < 1e-10, errors
    return errors
