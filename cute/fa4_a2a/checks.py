"""What the loaders refuse, before anything is compiled."""

DTYPES = ("bfloat16", "float16")


def check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype is bfloat16 or float16, not {dtype!r}")


def check_head_dim(head_dim: int) -> None:
    """Of kernels that move heads without computing on them."""
    if head_dim < 8 or head_dim % 8:
        raise ValueError(f"head_dim is a multiple of 8, not {head_dim}")
