"""The digest of a cache: what two caches must share to be the same sequence.

SHA-256 over this stream, little-endian. Per layer: kind (u8: 0 none, 1 attention, 2 recurrent).
Attention: the names of K's and V's block format (each a u32 length and ASCII), len and the value of
len_d (i64 each), the K bytes below len, the V bytes below len. Recurrent: the bytes of conv_state,
then of the current ssm_state. At the end pos (i64). ssm_state_alt, taps and logits do not count.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

from memra_driver.formats import FORMATS
from memra_driver.place import read_bytes

if TYPE_CHECKING:
    from memra_driver.cache import Cache

_NAMES = {form.code: form.name.encode("ascii") for form in FORMATS.values()}


def digest_of(cache: Cache) -> str:
    """The digest in hex, after the work queued before."""
    sha = hashlib.sha256()
    for kv, recur in zip(cache.kv, cache.recur, strict=True):
        if kv is not None:
            sha.update(b"\x01")
            for code in (kv.k_format, kv.v_format):
                sha.update(struct.pack("<I", len(_NAMES[code])) + _NAMES[code])
            (len_d,) = struct.unpack("<i", read_bytes(kv.len_d, 4))
            sha.update(struct.pack("<qq", kv.len, len_d))
            sha.update(read_bytes(kv.k, kv.len * kv.k_tok_bytes))
            sha.update(read_bytes(kv.v, kv.len * kv.v_tok_bytes))
        elif recur is not None:
            sha.update(b"\x02")
            for plane in (recur.conv_state, recur.ssm_state):
                sha.update(read_bytes(plane, plane.nbytes))
        else:
            sha.update(b"\x00")
    sha.update(struct.pack("<q", cache.pos))
    return sha.hexdigest()
