"""Drop-in layers for other libraries: torch, PyTorch Geometric, Hugging Face transformers."""
