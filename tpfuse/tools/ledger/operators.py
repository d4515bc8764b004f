"""The operators of one transformer encoder layer, in words in and out: unfused, and with the kernels of 2020.

Ivanov et al. 2020 ("Data Movement Is All You Need", arXiv:2007.00072).

    T = B S D    Q = 3 T    P = B H S^2    U = B S F    Wq = 3 D^2    Wo = D^2    Wf = D F

"2T+Wf -> U" reads 2T + Wf words and writes U.  A dropout mask counts one word an element.  This is a reading of the
paper's operator list, GEMMs at 2 M N K flops; the paper's own totals are not claimed.
"""

import re
from typing import NamedTuple

from .aten import ELEMENTWISE, GEMM, NORM
from .recorder import FORWARD, Row

# Parts of the layer, for a comparison line by line; see layer.py.
PRODUCTS, BIAS, SOFTMAX, DROPOUT = "matrix products", "biases", "scale and softmax", "dropout"
NORMS, OTHER, COPIES = "norms", "activation, residual", "copies"


class Operator(NamedTuple):
    """A row of the table; ``traffic`` is as "2T+Wf -> U"."""

    name: str
    traffic: str
    part: str
    phase: str
    kind: str


def _rows(text: str) -> list[Operator]:
    """Returns the operators of forward, and below a line "backward" those of backward; one without a part is a GEMM."""
    kinds = {PRODUCTS: GEMM, SOFTMAX: NORM, NORMS: NORM}
    rows, phase = [], FORWARD
    for line in text.strip().splitlines():
        name, *cells = (cell.strip() for cell in line.split("|"))
        if not cells:
            phase = name
            continue
        traffic, part = (*cells, PRODUCTS)[:2]
        rows.append(Operator(name, traffic, part, phase, kind=kinds.get(part, ELEMENTWISE)))
    return rows


_GEMMS = _rows(
    """
    QKV | T+Wq -> Q
    QK' | 2T -> P
    PV | P+T -> T
    out | T+Wo -> T
    linear 1 | T+Wf -> U
    linear 2 | U+Wf -> T
    backward
    linear 2 dx | T+Wf -> U
    linear 2 dW | U+T -> Wf
    linear 1 dx | U+Wf -> T
    linear 1 dW | U+T -> Wf
    out dx | T+Wo -> T
    out dW | 2T -> Wo
    PV dP | 2T -> P
    PV dV | P+T -> T
    QK' dQ | P+T -> T
    QK' dK | P+T -> T
    QKV dx | Q+Wq -> T
    QKV dW | Q+T -> Wq
    """
)

UNFUSED = _GEMMS + _rows(
    """
    QKV bias | Q -> Q | biases
    scale, softmax, dropout | P -> 3P | scale and softmax
    out bias | T -> T | biases
    dropout | T -> 2T | dropout
    residual | 2T -> T | activation, residual
    norm | T -> T | norms
    bias 1 | U -> U | biases
    relu | U -> U | activation, residual
    dropout of relu | U -> 2U | dropout
    bias 2 | T -> T | biases
    dropout | T -> 2T | dropout
    residual | 2T -> T | activation, residual
    norm | T -> T | norms
    backward
    norm dgamma, dbeta | 2T -> 0 | norms
    norm dx | 2T -> T | norms
    dropout | 2T -> T | dropout
    bias 2 | T -> 0 | biases
    dropout of relu | 2U -> U | dropout
    relu | 2U -> U | activation, residual
    bias 1 | U -> 0 | biases
    residual | 2T -> T | activation, residual
    norm dgamma, dbeta | 2T -> 0 | norms
    norm dx | 2T -> T | norms
    dropout | 2T -> T | dropout
    out bias | T -> 0 | biases
    softmax, dropout | 3P -> P | scale and softmax
    QKV bias | Q -> 0 | biases
    residual | 2T -> T | activation, residual
    """
)

FUSED = _GEMMS + _rows(
    """
    AIB | Q -> Q | biases
    SM | P -> 3P | scale and softmax
    BDRLN | 2T -> 3T | norms
    BRD | U -> 3U | activation, residual
    BDRLN | 2T -> 3T | norms
    backward
    BSB | 2T -> 0 | norms
    BLNRD | 3T -> 2T | norms
    BDRB | T+3U -> U | activation, residual
    EBSB | 3T -> T | norms
    BLNRD | 3T -> 2T | norms
    BAOB | T -> 0 | biases
    BS | 3P -> P | scale and softmax
    BAIB | Q -> 0 | biases
    BEI | 2T -> T | activation, residual
    """
)


def flash(operators: list[Operator]) -> list[Operator]:
    """Returns the same operators without the words of the scores: P is never written or read (14 P words less)."""
    without = lambda side: "+".join(term for term in side.split("+") if not term.strip().endswith("P")) or "0"
    return [o._replace(traffic=" -> ".join(without(side.strip()) for side in o.traffic.split("->"))) for o in operators]


class LayerSizes(NamedTuple):
    """B batch, S positions, D width, H heads, F ffn width."""

    B: int
    S: int
    D: int
    H: int
    F: int

    def symbols(self) -> dict[str, int]:
        """Returns the words of each symbol."""
        B, S, D, H, F = self
        return dict(T=B * S * D, Q=3 * B * S * D, P=B * H * S * S, U=B * S * F, Wq=3 * D * D, Wo=D * D, Wf=D * F)

    def count(self, side: str) -> int:
        """Returns the number of words of "2T+Wf"."""
        total = 0
        for term in side.split("+"):
            count, symbol = re.sub(r"[A-Za-z\s]", "", term), re.sub(r"[\d\s]", "", term)
            total += int(count or 1) * self.symbols()[symbol] if symbol else int(count)
        return total

    def row(self, operator: Operator, element_size: int) -> Row:
        read, written = (element_size * self.count(side) for side in operator.traffic.split("->"))
        return Row(calls=1, read=read, written=written, least=read + written, flops=self.flops(operator))

    def flops(self, operator: Operator) -> int:
        """Returns 2 M N K of a GEMM; 0 for other operators."""
        if operator.kind != GEMM:
            return 0
        scores = "K'" in operator.name or "PV" in operator.name
        weight = next((n for symbol, n in self.symbols().items() if symbol[0] == "W" and symbol in operator.traffic), 0)
        if not scores and not weight:
            raise ValueError(f"operators: {operator.name} is a GEMM of neither a weight nor scores: {operator.traffic}")
        return 2 * self.B * self.S * (self.S * self.D if scores else weight)
