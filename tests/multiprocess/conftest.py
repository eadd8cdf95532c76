import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def _pools():
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.stop()


@pytest.fixture
def ranks(_pools):
    """ranks(P): a pool of P ranks, shared by the session; made anew after a test broke it."""

    def get(size: int) -> RankPool:
        if size in _pools and _pools[size].broken:
            _pools.pop(size).stop()
        if size not in _pools:
            _pools[size] = RankPool(size)
        return _pools[size]

    return get


@pytest.fixture
def fresh_ranks():
    """fresh_ranks(P, environ): a pool of its own, for tests that end processes or change the environment."""
    pools = []

    def get(size: int, environ: dict[str, str] | None = None) -> RankPool:
        pools.append(RankPool(size, environ))
        return pools[-1]

    yield get
    for pool in pools:
        pool.broken = True
        pool.stop()
