"""Generation with a cache: token by token, by sampling or beam search.

beams          beam search
direct         generation's forward pass on a CPU
generate       generation with a cache, token by token
graph          a step as a CUDA graph
listening      what the caller hears meanwhile: streamers, on_token
model          what generation needs of a model
passes         its forward passes: ids in, logits of the last out, keys and values in a cache
request        what it is asked for, checked
sampling       how the next token is chosen
shared_memory  all-gathers of a few kilobytes between the ranks of one machine
step           one token of every sequence
stop_strings   whether its last token completes a string
stopping       when a sequence ends
"""
