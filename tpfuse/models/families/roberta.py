"""RoBERTa (Liu et al. 2019, arXiv:1907.11692), and XLM-RoBERTa and CamemBERT, which are RoBERTa by other names.

Positions count the tokens that are not padding; the head of a sequence has a linear layer of its own.
"""

from functools import partial

from ..files.source import Source
from .bert_like import PLAIN, bert_like, body, head
from .family import SEQUENCE, TOKEN, HeadLayers
from .names import NamingConfig, flat, linear, norm


def roberta_sources(config: NamingConfig) -> dict[str, Source]:
    """RobertaForMaskedLM and RobertaModel."""
    transform = {"transform": linear("lm_head.dense"), "transform_norm": norm("lm_head.layer_norm")}
    return flat(body(config) | head(config, "lm_head") | transform)


roberta = partial(
    bert_like,
    base_prefix="roberta.",
    head_prefixes=("lm_head.",),
    sources=roberta_sources,
    fixed=PLAIN | dict(positions_skip_padding=True, head_activation="gelu"),
    ignorable=(r"embeddings\.position_ids", r"lm_head\.bias", r"lm_head\.decoder\.(weight|bias)"),
    classifiers={SEQUENCE: "classifier.out_proj", TOKEN: "classifier"},
    heads={SEQUENCE: HeadLayers("classifier.dense", dropped=True)},
)
ROBERTA = roberta(architecture="RobertaForMaskedLM")
XLM_ROBERTA = roberta(architecture="XLMRobertaForMaskedLM")
CAMEMBERT = roberta(architecture="CamembertForMaskedLM")
