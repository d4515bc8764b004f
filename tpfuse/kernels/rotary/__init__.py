"""Rotary positions, and the tables of their cosines and sines.

op         rotary positions
reference  the rotation in plain torch
table      their tables, in every scaling of transformers
"""
