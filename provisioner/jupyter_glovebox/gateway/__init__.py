"""Egress gateway: the only way out for bytes, rule by rule. Not built yet: a plan with network rules is refused."""
