"""Drop-in layers for other libraries. Each subpackage keeps that library's constructors, calls and parameter names."""

__all__: list[str] = []
