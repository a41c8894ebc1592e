"""The search for homes. Pure."""

from zerooffload.planner.search.homes import Counts, HomeSearch, Setting
from zerooffload.planner.search.kinds import TIERS, HomeCost, Kind, kinds_of

__all__ = ["TIERS", "Counts", "HomeCost", "HomeSearch", "Kind", "Setting", "kinds_of"]
