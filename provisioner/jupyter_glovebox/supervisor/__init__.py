"""The supervisor: one small process per kernel that owns the whole life of its sandbox.

`process` is the manager's side (start one, talk to it); `main` is the process itself.
"""
