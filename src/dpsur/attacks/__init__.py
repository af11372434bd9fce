"""Attacks on trained models: who was in the training set?

An attack gets models and records, or a trainer that makes models, passed in. It knows nothing of
how a model was trained.
"""
