"""Tensor numerics, without bases or structures: registered torch operators, and functions that combine them.

`operator` says how an operator is declared: its schema, checks, shapes and kernels, and the form composed of other
operators that stands in for the kernels and has every derivative. The kernels are those of `native` on a CPU and of
`triton` on a GPU.
"""

__all__ = ()
