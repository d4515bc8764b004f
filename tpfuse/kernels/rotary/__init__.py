"""Rotary positions, and the tables of their cosines and sines.

op     rotary positions
table  their tables, in every scaling of transformers
"""
