import pytest
from cubin import no_local_memory, uses
from device_view import INT, device_view
from fa4_a2a.clock import SLOTS, WORDS, load_clock


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_cycles_and_time_leave_by_one_store(arch, sass):
    load_clock(arch)
    lines = sass(f"clock-{arch}")
    assert no_local_memory(lines)
    assert uses(lines, "STG.E.128") == 1, "two stores could be of two blocks"
    assert uses(lines, "STG") == 1


def test_the_call_reaches_the_launch(no_gpu):
    if not no_gpu:
        pytest.skip("the addresses are made up")
    with pytest.raises(RuntimeError, match="Cuda"):
        load_clock("sm_90a")(device_view((SLOTS * WORDS,), code=INT, bits=64), 132)
    with pytest.raises((TypeError, ValueError), match=r"#0|table"):
        load_clock("sm_90a")(device_view((SLOTS * WORDS,), code=INT, bits=32), 132)
