import pytest
import torch


@pytest.fixture
def device(need):
    need("gpu", torch.cuda.is_available(), "needs a GPU")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def arch(device, need):
    """Of the kernels for sm_90 alone."""
    capability = torch.cuda.get_device_capability(device)
    need("gpu", capability == (9, 0), f"this kernel is for compute capability 9.0, this is {capability}")
    return "sm_90a"
