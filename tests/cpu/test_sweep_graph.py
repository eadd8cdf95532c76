"""Serial attention as a graph in the sweep: taken where every rank can capture it, else the line says why not."""

import pytest

from fa_a2a.bench import graphs, sweep


class Graph:
    def replay(self):
        return "replayed"


class Ranks:
    """This rank beside one that could capture, or not."""

    def __init__(self, other=""):
        self.other = other

    def exchange(self, topic, reason, timeout_s):
        return [self.other, reason]


def test_replays_where_every_rank_can(monkeypatch):
    monkeypatch.setattr(graphs, "capture", lambda call, calls: (Graph(), call()))
    ran = []
    replay, reason = sweep._replayed(lambda: ran.append(1), Ranks())
    assert (replay(), reason) == ("replayed", "") and len(ran) == 2, "once before the capture, once in it"


@pytest.mark.parametrize(
    ("other", "own", "told"), [("no\n", None, "no\n"), ("", "not\nhere", "not"), ("no", "not", "no")]
)
def test_none_and_why_where_a_rank_cannot(monkeypatch, other, own, told):
    def capture(call, calls):
        if own is None:
            return Graph(), call()
        try:
            raise RuntimeError(own)
        except RuntimeError:
            raise RuntimeError("the capture was invalidated")  # noqa: B904 as torch's end of a capture does

    monkeypatch.setattr(graphs, "capture", capture)
    assert sweep._replayed(lambda: None, Ranks(other)) == (None, told)
