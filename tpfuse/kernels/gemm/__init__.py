"""GEMMs with fused activations, and activations on their own.

activation         ACTIVATIONS: value and derivative in torch and Triton, gated form, names
cost               what its GEMMs move and compute
gated              activations on their own, gated ones first
op                 linear and the GEMMs of its backward: reference, autograd
prepared           on a CPU: maps by weights in the form that their GEMM reads fastest
runs               on a CPU: activations in runs of elements, gate and up as words
triton_activation  Triton: activations and column sums in passes of their own
triton_gemm        Triton: one persistent GEMM and its epilogues
"""
