"""Every op on small tensors against its definition in fp64, and a block over the group.

blame       the op that a wrong result comes from
block       a block on one rank, and split over the group
cases       the public functions of kernels/ on small tensors
compare     errors and limits, as lines of the report
kernels     runs them; masks bitwise
references  every op by its definition, whatever the device would pick
"""
