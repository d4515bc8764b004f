"""Hugging Face directories in and out: config.json, safetensors (one file, or shards with an index), tokenizer files.

directory  what is opened in a directory of unknown origin, and how much of it is parsed
disk       files that appear whole or not at all
names      the names of a model's tensors in Hugging Face files
read       a directory -> parameters; a rank reads its slices only
source     how a parameter is made of a file's tensors, as an einops pattern
write      a model -> a directory that transformers loads
"""
