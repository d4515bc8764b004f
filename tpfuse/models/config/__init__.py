"""Configurations of models, made by hand or read from a Hugging Face config.json.

bert    BertConfig
fields  the values that each field may have
gpt     GPTConfig
model   the part that both share
reader  reads a config.json for one of them
rotary  rotary positions of a config and of its file
"""
