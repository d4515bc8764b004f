"""Messages between the ranks of a group beside tensors: agreement, errors on every rank, the rank that has ended.

agreement  what ranks must share is compared before it is used
failure    why another rank has ended
gloo       more connections between a group's ranks
groups     the groups that a TensorParallel is made of
messages   objects gathered, with the number of a rank that has ended; an error on one rank is an error on every rank
split      calls for the moment when parameters are first split
threads    threads of a rank whose calls overlap, named
"""
