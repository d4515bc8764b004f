"""Hugging Face directories in and out: config.json, safetensors (one file, or shards with an index), tokenizer files.

directory  what is opened in a directory of unknown origin, and how much of it is parsed
disk       files that appear whole or not at all
filed      what its tensors are called in Hugging Face files
model      what a model offers to those who read and write its files
read       a directory -> parameters; a rank reads its slices only
source     how a parameter is made of a file's tensors, as an einops pattern
write      a model -> a directory that transformers loads
"""
