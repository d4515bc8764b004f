"""Directories that somebody spoilt on purpose, by the thousand."""
