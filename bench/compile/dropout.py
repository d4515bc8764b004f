"""dropout: a row in registers and a wide one; rows in two pieces."""

from bench.compile._compile import Call, meta
from bench.compile.reduce_bias_dropout_add_norm import ELEMENTS, MASK, TWO_PIECES, M
from tpfuse.kernels.norm.verbs import dropout_fwd

CALLS = {f"D={D}": Call(lambda D=D: dropout_fwd.launch(meta(M, D), MASK), ELEMENTS) for D in (1024, 4096, 32768)}
CALLS["D=1024 two pieces"] = Call(lambda: dropout_fwd.launch(meta(M, 1024), TWO_PIECES), ELEMENTS)
