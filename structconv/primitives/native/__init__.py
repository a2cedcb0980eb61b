"""The native CPU core: C++ kernels behind torch's stable ABI, their operators, and what stands in for them.

- `structconv.primitives.csr.spmm` and `sddmm`: sparse products; the native kernel is the body of `structconv::spmm` and
  `structconv::sddmm` on a CPU.
- `product.spmm_add(by_target, by_source, values, x, z, alpha=, beta=)`: alpha A^T x + beta z in one pass.
- `affine.affine_attention(by_target, by_source, source, target, x, slope=, dropout=, seed=)`: the softmax of
  leaky_relu(s_m + t_n) over the edges into n, applied to x (GAT).
- `bilinear.bilinear_attention(by_target, by_source, q, k, v, bias, scale=, dropout=, seed=)`: the same of
  scale <q_n, k_m> + bias_e.
- `packed_attention.packed_attention(by_target, by_source, table, q, bias, heads=, depth=, scale=, dropout=, seed=)`:
  the same of queries, keys and values that are columns of one table.
- `additive.additive_attention(by_target, by_source, q, k, x, vector, activation=, slope=, dropout=, seed=)`: the same
  of <v, act(q_n + k_m)> (GATv2, Bahdanau); `additive_dense.dense_additive_attention(q, k, x, vector, ...)` over all
  pairs.
- `weights.affine_weights(by_target, by_source, source, target, ...)`, `bilinear_weights(..., q, k, bias, ...)` and
  `additive_weights(..., q, k, vector, ...)`: what the three apply, (K, E).
- `structconv.primitives.products.product` and `outer`: x w + bias and x^T y of tall matrices in float32, by `gemm`
  where its kernels are faster than MKL and oneDNN.

Each is a registered operator of that name (the last two `project` and `outer`) in the namespace `structconv`, with fake
kernels and gradients.

float32 and bfloat16 (with float32 sums) on a CPU run natively; float64, other devices, and a machine without a
compiler run torch's operators with the same contract. Nothing of size (E, K, C) is ever held. A row belongs to one
thread: the numbers do not depend on the number of threads. `status()` says what is used and why.
"""

from __future__ import annotations

from structconv.primitives.native.loader import Status, core, status

__all__ = ["Status", "core", "status"]
