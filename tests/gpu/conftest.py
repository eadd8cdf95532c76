import pytest
import torch


@pytest.fixture
def device(need):
    need("gpu", torch.cuda.is_available(), "needs a GPU")
    return torch.device("cuda", torch.cuda.current_device())
