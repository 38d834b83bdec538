"""Jupyter Glovebox: notebook kernels in a sandbox, under a capability manifest."""

__version__ = "0.1.0.dev0"
