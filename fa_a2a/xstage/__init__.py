"""X-Stage: when is the exchange after attention hidden? A small calibrated model, pure Python.

The equations are in fa_a2a.xstage.burst_gap; the names here are what a caller needs.
"""

from .attention import AttentionAudit, audit_attention
from .measures import hidden_fraction, speedup
from .platform import PlatformProfile
from .profile_io import available_profiles, load_profile, save_profile
from .shape import AttentionShape

__all__ = [
    "AttentionAudit",
    "AttentionShape",
    "PlatformProfile",
    "audit_attention",
    "available_profiles",
    "hidden_fraction",
    "load_profile",
    "save_profile",
    "speedup",
]
