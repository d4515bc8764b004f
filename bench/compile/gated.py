"""swiglu and geglu: in the epilogues of linear's GEMMs, and as passes of their own."""

from bench.compile._compile import Call
from bench.compile.linear import ELEMENTS, backward, forward, gemm, passes

CALLS = {
    "swiglu": gemm(forward, "swiglu"),
    "geglu": gemm(forward, "geglu"),
    "geglu_tanh": gemm(forward, "geglu_tanh"),
    "dgrad swiglu": gemm(backward, "swiglu"),
    "dgrad geglu": gemm(backward, "geglu"),
    "dgrad geglu_tanh": gemm(backward, "geglu_tanh"),
    "passes swiglu": Call(lambda: passes("swiglu"), ELEMENTS),
    "passes geglu": Call(lambda: passes("geglu"), ELEMENTS),
}
