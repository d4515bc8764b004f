"""Configurations: what a model is made of.

bert    BertConfig
fields  what each field of them may hold
gpt     GPTConfig: what a model is made of
reader  a config.json, read for one of them
rotary  rotary positions of a config and of its file
"""
