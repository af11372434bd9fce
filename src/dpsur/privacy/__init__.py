"""Accounting. Nothing here knows of tensors or training.

Mechanisms emit `events`, whose ledger counts them, `accountants` turn counts into epsilon, and
`accounting` names the ways to do so. A `plan` fixes a run's privacy before it starts, `planning`
finds one for a budget, an `account` charges its steps. A `statement` is what a release says.
"""
