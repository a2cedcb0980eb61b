"""Compile every launch of the GPU kernels, without a GPU: `python compile_triton.py CAPABILITY...`, such as 80 90.

Prints a line a kernel; ends with an exception where one does not compile to machine code.
"""

import os
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from structconv.primitives.hashing import Drop
from structconv.primitives.layout import compress
from structconv.primitives.triton import common, splits

EVERY = bool(os.environ.get("STRUCTCONV_EVERY_TEST"))
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32",
            torch.int64: "*i64"}


def compile_only(kernel, programs, warps, *arguments, **constants):
    """In place of `common.launch`: what a launch with these arguments would compile."""
    if not programs:
        return
    types, values, hints = dict.fromkeys(constants, "constexpr"), dict(constants), {}
    for place, (name, argument) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
        if isinstance(argument, torch.Tensor):
            types[name], hints[place,] = POINTERS[argument.dtype], [["tt.divisibility", 16]]
        elif argument == 1 and isinstance(argument, int):
            types[name], values[name] = "constexpr", 1
        else:
            types[name] = "i32" if isinstance(argument, int) else "fp32"
    ordered = {name: types[name] for name in kernel.arg_names}
    for capability in map(int, sys.argv[1:]):
        made = triton.compile(ASTSource(kernel, ordered, values, hints), target=GPUTarget("cuda", capability, 32),
                              options={"num_warps": warps, "enable_fp_fusion": True})
        print(f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__} {capability} {len(made.asm['cubin'])}")


def main():
    """Every kernel with every option on; with STRUCTCONV_EVERY_TEST=1 every launch, and then with every option off."""
    common.launch = compile_only
    from structconv.primitives.triton import kernels  # takes `launch` as it is now

    splits.LONGEST, seed = 8, torch.tensor(3)
    source, target = torch.arange(60) % 4, torch.arange(60) % 3
    layouts = compress(target, source, 3), compress(source, target, 4)
    options = ((torch.bfloat16, 2, 16, Drop(0.5, seed, 2), torch.ones(2, 60)),
               (torch.float32, 1, 20, Drop(0, None, 1), None))
    for dtype, heads, channels, drop, bias in options if EVERY else options[:1]:
        x, g, s, t = (torch.ones(n, heads, *c, dtype=dtype)
                      for n, c in ((4, (channels,)), (3, (channels,)), (4, ()), (3, ())))
        saved = kernels.affine_forward(layouts[0], s, t, x, 0.2, drop, True)
        kernels.affine_backward(*layouts, s, t, x, *saved, g, 0.2, drop)
        if EVERY:
            kernels.affine_forward(layouts[0], s, t, x, 0.2, drop, False)
        saved = kernels.bilinear_forward(layouts[0], g, x, x, bias, 0.5, drop)
        kernels.bilinear_backward(*layouts, g, x, x, bias, *saved, g, 0.5, drop)
        saved = kernels.additive_forward(layouts[0], g, x, x, x[0], int(drop.p > 0), 2.0, drop)
        kernels.additive_backward(*layouts, g, x, x, x[0], *saved, g, int(drop.p > 0), 2.0, drop)
        heads_first, z = x.transpose(0, 1), g.transpose(0, 1)
        values = torch.ones(heads, 60, dtype=dtype)
        kernels.spmm(layouts[0], values, heads_first, z, heads, heads, 2.0, 1.0)
        if EVERY:
            kernels.spmm(layouts[0], values, heads_first[:1], None, heads, heads, 1.0, 0.0)
            kernels.spmm(layouts[0], None, heads_first[:1], None, 1, 1, 1.0, 0.0)
        kernels.sddmm(layouts[0], z, heads_first, heads)


if __name__ == "__main__":
    main()
