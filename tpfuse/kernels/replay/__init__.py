"""The launches of a call, recorded once and done again without its Python code.

recorder  what a launcher does, written down
replay    a launcher's call recorded once and done again without it
tape      what was written down, done again on other tensors
"""
