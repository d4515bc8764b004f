"""Generation with a cache: token by token, by sampling or beam search.

beams          beam search
direct         generation's forward pass on a CPU
exchange       messages, through memory that the ranks of one machine share
experts        experts of that pass
generate       generation with a cache, token by token
graph          a step as a CUDA graph
guessing       guesses tokens by prompt lookup or an assistant, which one pass of the model confirms
leaves         the forward pass on a CPU with bitwise: the training forward's own calls
listening      streamers, on_token and on_prompt, which hear tokens as they come
model          the part of a model that generation uses
options        transformers' arguments: which are read, which change no token, which are not built
options.json   their defaults in transformers, as python -m bench.defaults writes them
outputs        scores and logits of every step, in transformers' classes
passes         its forward passes: ids in, logits of the last out, keys and values in a cache
processors     transformers' own processors of scores, made of the arguments
request        the arguments, checked
sampling       chooses the next token
step           one token of every sequence
stop_strings   strings that end a sequence
stopping       ends a sequence: by a token, a string or a criterion
"""
