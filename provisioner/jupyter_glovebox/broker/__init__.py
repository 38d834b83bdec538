"""Credential broker. Not built yet: a plan with credentials is refused."""
