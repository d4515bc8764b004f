"""GEMMs with the exchange of rows that they need, under sequence parallelism and without."""

from .plain import exchange, gather_linear, gather_mlp_exchange, leave_parts, linear_exchange

__all__ = ["exchange", "gather_linear", "gather_mlp_exchange", "leave_parts", "linear_exchange"]
