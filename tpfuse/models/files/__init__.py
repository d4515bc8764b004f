"""Hugging Face directories in and out: config.json, safetensors (one file, or shards with an index), tokenizer files.

directory  opens files of a directory of unknown origin, within limits
disk       files that appear whole or not at all
names      the names of a model's tensors in Hugging Face files
read       a directory -> parameters; a rank reads its slices only
source     the file's tensors that a parameter is made of, and an einops pattern
write      a model -> a directory that transformers loads
"""
