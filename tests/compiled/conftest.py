"""One cache of compiled code for the session: each region is compiled once."""

from __future__ import annotations

import os
import tempfile

if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    _inductor_cache = tempfile.TemporaryDirectory(prefix="memopt-inductor-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _inductor_cache.name
