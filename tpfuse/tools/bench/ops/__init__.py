"""one file an op: what is timed, and against what

attention                     causal, with dropout
cross_entropy                 of logits
dropout                       on its own
embed_finish                  what follows the lookup in GPT
embedding                     lookup and gradient
experts                       gated MLPs of the experts that rows chose
layer_norm                    LayerNorm
linear                        a GEMM with a bias
linear_cross_entropy          the loss without logits
linear_gelu                   the first half of an MLP
reduce_bias_dropout_add_norm  the kernel between two GEMMs
rms_norm                      RMSNorm
rope                          rotary positions
sparse                        a pruned weight in int8
swiglu                        the gate
"""
