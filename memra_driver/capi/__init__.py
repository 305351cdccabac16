"""The C library from Python: libmemra_driver.so, loaded and checked, under the cache.

`CDev` is a device whose operations are the library's. A cache of Python's and the library share its structs, so both
may work on one cache in any order: `ops` has the operations of a step and `calls` those of a cache, with the arguments
that `memra_driver.ops` and `Cache` have, on a cache of any CUDA devices (`bind`).
"""

from . import calls, ops
from .device import CDev, bind
from .library import Library, Status, load

__all__ = ["CDev", "Library", "Status", "bind", "calls", "load", "ops"]
