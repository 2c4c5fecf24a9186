"""Draft trees: the choice of how many nodes a step verifies, its result, and corrections of the drafter's confidence.

A chain is a tree of width 1. The steps themselves are in `programs/tree.py`.
"""
