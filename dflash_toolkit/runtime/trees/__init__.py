"""Draft trees: how many nodes a step verifies, what its result says, and how far promises are trusted.

A chain is a tree of width 1. The steps themselves are in `programs/tree.py`.
"""
