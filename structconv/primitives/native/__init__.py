"""The native CPU core: C++ kernels behind torch's stable ABI. It is built, loaded and called here.

The operators that use it are in the files of `structconv.primitives`. Layers along sorted edges are single nodes of
autograd, `layer`.

float32 and bfloat16 (with float32 sums) on a CPU run natively; float64, other devices, and a machine without a
compiler run torch's operators with the same contract. Nothing of size (E, K, C) is ever held. A row belongs to one
thread: the numbers do not depend on the number of threads. `status()` says what is used and why.
"""

from __future__ import annotations

from structconv.primitives.native.loader import Status, core, status

__all__ = ["Status", "core", "status"]
