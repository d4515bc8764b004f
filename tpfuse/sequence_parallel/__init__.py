"""GEMMs with the exchange of rows that they need, under sequence parallelism and without.

assumed        numbers of rows that experts have where nothing is computed
attention      both projections with attention between them
choice         which form an op takes, by sizes and what was measured
column_linear  column-parallel linear
context        attention over sequences of which each rank holds a piece
crossings      gather_rows, scatter_rows, exchange: between row shards and GEMMs
experts        the experts of all ranks for the rows of this one
flight         row tiles on their way between ranks while GEMMs run
forms/         the same functions in three forms
loss           the loss from row shards, without logits
mlp            both GEMMs of an MLP as one op
overlap/       the opaque ops of the two forms that overlap
records        what the forms of an op take and give; a weight's gradient as a unit of work
routes         rows to the ranks of their experts, and results back
row_linear     row-parallel linear without its sum
shared_expert  an expert that every row has
"""

from .attention import gather_attention_exchange
from .column_linear import gather_linear
from .crossings import exchange, leave_parts
from .experts import routed_experts
from .loss import gather_linear_cross_entropy
from .mlp import gather_mlp_exchange
from .row_linear import linear_exchange

__all__ = [
    "exchange",
    "gather_attention_exchange",
    "gather_linear",
    "gather_linear_cross_entropy",
    "gather_mlp_exchange",
    "leave_parts",
    "linear_exchange",
    "routed_experts",
]
