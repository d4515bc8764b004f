"""The ops of the overlapped and the replicated form: messages travel while GEMMs run, forward and backward.

    op                    forward                                    backward
    gather_linear         own rows' GEMM, each peer's as it lands    n is gathered under dgrad, dn leaves under dgrad
                                                                     and wgrad
    linear_exchange       peers' rows' GEMMs leave, own rows' last   dp lands under dgrad, then wgrad
    gather_mlp_exchange   rows land, pass both GEMMs and leave       dp lands, passes both dgrads and leaves; n is
                                                                     gathered meanwhile; both wgrads
    attention_of_heads    q, k, v of a round land and its o leaves   do lands and dqkv leaves under attention of other
                          under attention of other rounds            rounds
    linear_reduce                                                    without sequence parallelism: the sum of dx travels
                                                                     under the wgrads

Messages land in place, and GEMMs and activations write their rows in place.  The order of GEMMs and messages is a
function of rank and shapes alone, never of arrival: two runs agree bitwise.  Values and gradients are bitwise those of
the plain form with its GEMMs in the same pieces of rows, except the MLP's bias gradient, which is added piece by
piece. Whether a GEMM gives a row the same bits in pieces as in one is up to its library: with AVX-512 MKL's does in
pieces of 16 rows and more, with AVX2 it does not.

Shapes: n, dp, dn [R, m, D], n and dp with any stride over R; dy, y [M, N]; w, w1 [N, D], w2 [D, N]; w1 of a gated
activation is [2 N, D].  ``group_name`` is a process group's.

attention  of gather_attention_exchange
heads      of attention_of_heads, over context-parallel ranks
linear     of gather_linear and linear_exchange
mlp        of gather_mlp_exchange
reduce     the sum of dx under the wgrads
steps      rows gathered or sent piece by piece beside a GEMM
"""
