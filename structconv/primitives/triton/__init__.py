"""The sparse kernels on a GPU, in Triton, with the contracts of the native core.

- `product`: y = alpha A x + beta z for several rows of edge values, and the sampled product, its adjoint.
- `affine`: attention with scores leaky_relu(s_m + t_n) (GAT), forward and backward.
- `bilinear`: attention with scores scale <q_n, k_m> + bias_e, forward and backward.
- `additive`: attention with scores <v, act(q_n + k_m)> (GATv2), forward and backward.

They are the bodies of structconv::spmm, spmm_add, sddmm, affine_attention, bilinear_attention and additive_attention
on CUDA tensors of float32, bfloat16 or float16; all sums are float32. Nothing of size (E, K) is held, forward or
backward. A row of more than `splits.LONGEST` edges is cut into parts of that length, which a second pass adds up in
order: no atomics, so the same input gives the same bits.

Triton comes with the CUDA builds of torch and is imported at the first CUDA tensor, never before; without it, or
where it cannot compile, torch's operators run with the same numbers. `STRUCTCONV_TRITON=0` turns the kernels off.
"""

from __future__ import annotations

from structconv.primitives.triton.choice import status, usable, usable_product, working

__all__ = ["status", "usable", "usable_product", "working"]
