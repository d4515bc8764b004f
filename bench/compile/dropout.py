"""dropout: a row in registers and a wide one."""

from bench.compile._compile import Call, meta
from bench.compile.reduce_bias_dropout_add_norm import ELEMENTS, RNG, WHERE, M
from tpfuse.kernels._fused_norm import dropout_launch

CALLS = {f"D={D}": Call(lambda D=D: dropout_launch(meta(M, D), RNG, *WHERE), ELEMENTS) for D in (1024, 4096, 32768)}
