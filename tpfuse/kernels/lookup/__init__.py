"""The lookup in a slice of a table.

op      embedding: reference, autograd
triton  Triton: the lookup and its deterministic backward
"""
