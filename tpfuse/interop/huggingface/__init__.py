"""Hugging Face directories in and out: config.json, safetensors (one file, or shards with an index), tokenizer files.

source     how a parameter is made of a file's tensors, read in both directions
directory  what is opened in a directory of unknown origin
model      what a model offers to those who read and write its files
read       a directory or tensors in memory -> a model's parameters
write      a model -> a directory that transformers loads
disk       files that appear whole or not at all
together   an error on one rank is an error on every rank
"""
