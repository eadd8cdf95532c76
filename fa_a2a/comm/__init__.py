"""Symmetric memory of a process group, and the protocol that says who may read or write it."""
