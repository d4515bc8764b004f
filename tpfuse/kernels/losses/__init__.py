"""Cross-entropy of logits, and of a linear layer whose logits are never stored.

linear         of a linear layer whose logits never exist as a whole
linear_cost    what its launchers move and compute
linear_triton  Triton: of a linear layer
op             cross_entropy of logits
options        the records its ops take
triton         Triton: of logits
"""
