"""X-Stage: when is the exchange after attention hidden? A small calibrated model, pure Python.

The equations are in fa_a2a.xstage.burst_gap; the names here are what a caller needs.
"""

from .attention import AttentionAudit, audit_attention
from .cost import CostPrediction, predict_cost
from .designs import DESIGNS, KernelDesign, design, design_of
from .measures import hidden_fraction, speedup, wait_for_slowest_us
from .platform import PlatformProfile
from .profile_io import (
    available_profiles,
    load_profile,
    nearest_profile,
    profile_hash,
    save_profile,
    shipped_profile,
)
from .shape import AttentionShape

__all__ = [
    "DESIGNS",
    "AttentionAudit",
    "AttentionShape",
    "CostPrediction",
    "KernelDesign",
    "PlatformProfile",
    "audit_attention",
    "available_profiles",
    "design",
    "design_of",
    "hidden_fraction",
    "load_profile",
    "nearest_profile",
    "predict_cost",
    "profile_hash",
    "save_profile",
    "shipped_profile",
    "speedup",
    "wait_for_slowest_us",
]
