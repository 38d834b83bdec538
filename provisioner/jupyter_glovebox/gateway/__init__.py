"""Egress gateway, the only way out for bytes. Not built yet: a plan with network rules is refused."""
