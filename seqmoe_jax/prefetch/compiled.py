"""The decorator of everything compiled with numba.

The compiled code is cached on disk, so only the first use on a machine waits for the compiler; importing a module
that uses it imports numba, which is why nothing does at the top of the package. `nogil` lets a worker thread
schedule while Python runs elsewhere.

A function below `compiled` also carries `typing.no_type_check`: numba compiles the plain function, so a checker of
annotations must not wrap it first.
"""

from __future__ import annotations

from numba import njit

compiled = njit(cache=True, nogil=True)
