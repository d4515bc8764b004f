"""Messages between the ranks of a group: agreement, errors on every rank, the rank that has ended, shared memory.

agreement      what ranks must share is compared before it is used
failure        why another rank has ended
gloo           more connections between a group's ranks
groups         the groups that a TensorParallel is made of
messages       objects gathered, with the number of a rank that has ended; an error on one rank is one on every rank
shared_memory  all-gathers and exchanges of tensors between the ranks of one machine
split          calls for the moment when parameters are first split
threads        threads of a rank whose calls overlap, named
turns          turns that the ranks of one machine take over memory that they share
"""
