"""The methods that the paper compares DPSUR with, its predecessor and a successor.

Importing `reproduction` registers them beside those of the library, so that experiments,
`dpsur train --method dpis` in a checkout and the verification of their releases find them by name.
"""

from dpsur.methods import METHODS
from reproduction.methods.dpagd import Dpagd
from reproduction.methods.dpis import Dpis
from reproduction.methods.dpsgd_ts import DpsgdTs
from reproduction.methods.dpsr_cg import DpsrCg
from reproduction.methods.sa_dpsgd import SaDpsgd

for method in (DpsgdTs, Dpis, Dpagd, SaDpsgd, DpsrCg):
    METHODS[method.name] = method

__all__ = ["Dpagd", "Dpis", "DpsgdTs", "DpsrCg", "SaDpsgd"]
