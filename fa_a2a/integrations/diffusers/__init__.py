"""The attention backend "fa_a2a" of diffusers models, and context parallelism for models without a plan of their own.

from diffusers import ContextParallelConfig
from fa_a2a.integrations import diffusers as fa

fa.enable()
model.set_attention_backend("fa_a2a")
fa.parallelize(model, ContextParallelConfig(ulysses_degree=P))   # enable_parallelism, and what padded text needs
"""

from .plans import parallelize
from .registry import NAME, TESTED_VERSIONS, disable, enable

__all__ = ["NAME", "TESTED_VERSIONS", "disable", "enable", "parallelize"]
