"""Jupyter server extension. Not built yet: use the command line or any jupyter_client program."""
