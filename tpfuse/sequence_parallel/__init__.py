"""GEMMs with the exchange of rows that they need, under sequence parallelism and without."""

from .attention import gather_attention_exchange
from .crossings import exchange, leave_parts
from .gather_linear import gather_linear
from .linear_exchange import linear_exchange
from .loss import gather_linear_cross_entropy
from .mlp import gather_mlp_exchange

__all__ = [
    "exchange",
    "gather_attention_exchange",
    "gather_linear",
    "gather_linear_cross_entropy",
    "gather_mlp_exchange",
    "leave_parts",
    "linear_exchange",
]
