"""Operators that replace slow ones of the models, a package each. Nothing here knows the host."""
