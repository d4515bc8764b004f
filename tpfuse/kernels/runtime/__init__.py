"""The base of every kernel: registration of ops, launches, tuned parameters, Philox, the one import of Triton.

captures    inputs of linear layers and gradients of their outputs, handed over
counters    counters that tell which program of a kernel is the last
deferred    gradients of weights handed over as work
device      Triton functions that several kernels use
errors      the ValueError of a public function
function    torch.autograd.Function with less host time a call
leaves      sums as binary trees: the same bits at every number of ranks
heap        memory that a step on a CPU frees stays in the process
launch      starts a kernel with parameters that are a function of the call's shapes; what descriptors hold
main_grad   gradients of weights added in fp32
matmul      matrix products on a CPU, in 16 bits on any processor
op          one op = schema, reference, launcher, fake, cost; the records of its arguments
partials    partial sums of programs, added in one order
philox      dropout's mask, initial weights, sampling: Philox in torch, numpy and Triton
processor   what a CPU multiplies, and what chooses the order of a sum inside a call
rules       rules of values: type, range, the words of the error
shortcut    faster ways of a computation by leaves, where they give its bits
tiles       tiles of rows: a row has the same bits whatever is beside it
triton      the only import of triton, and a stand-in where it is missing
tuned.json  what bench.tune and bench.overlap measured
tuning      launch parameters from tuned.json
"""
