"""BERT (Devlin et al. 2018, arXiv:1810.04805)."""

from ..files.source import Source
from .bert_like import PLAIN, bert_like, body, head
from .family import SEQUENCE, TOKEN
from .names import NamingConfig, flat, linear, norm


def bert_sources(config: NamingConfig) -> dict[str, Source]:
    """BertForMaskedLM and BertModel: q, k and v apart, norms after the GEMM pairs."""
    modules = (
        body(config)
        | head(config, "cls.predictions")
        | {
            "transform": linear("cls.predictions.transform.dense"),
            "transform_norm": norm("cls.predictions.transform.LayerNorm"),
        }
    )
    return flat(modules)


BERT = bert_like(
    architecture="BertForMaskedLM",
    base_prefix="bert.",
    head_prefixes=("cls.",),
    sources=bert_sources,
    fixed=PLAIN,
    ignorable=(
        r"embeddings\.position_ids", r"cls\.seq_relationship\.(weight|bias)",
        r"cls\.predictions\.bias", r"cls\.predictions\.decoder\.(weight|bias)",
    ),
    classifiers={SEQUENCE: "classifier", TOKEN: "classifier"},
)  # fmt: skip
