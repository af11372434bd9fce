"""Accounting. Nothing here knows of tensors or training.

Mechanisms emit `events`, a `ledger` counts them, `accountants` turn counts into epsilon, and
`accounting` names the ways to do so. `plans` fix a run's privacy before it starts. `calibrate` has
the public functions, `statement` what a release says; `claims` checks it and `page` prints it.
"""
