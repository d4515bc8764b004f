"""What the ranks of a group say to each other beside tensors: agreement, errors on every rank, who has ended.

agreement  what ranks must share is compared before it is used
failure    why another rank has ended
gloo       more connections between a group's ranks
rollcall   a gather that says which rank has ended
together   an error on one rank is an error on every rank
"""
