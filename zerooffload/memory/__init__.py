"""Budgets: every byte of ours is leased before it is taken."""

from zerooffload.memory.budget import Budget, Lease

__all__ = ["Budget", "Lease"]
