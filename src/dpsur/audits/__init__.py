"""Lower bounds on epsilon from what a mechanism does, to hold against what is claimed for it.

A lower bound above the claimed epsilon contradicts the claim at its confidence. One below it proves
nothing: docs/auditing.md says how to read it.
"""
