"""Pictures of placements: what they show, without looking at pixels."""

from __future__ import annotations

from random import Random

import pytest

from memopt.models.generate import random_graph
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.report.address_plots import plot_addresses, plot_fragmentation
from memopt.report.lifetime_plots import plot_lifetimes, plot_orders
from memopt.report.placed_blocks import blocks
from memopt.strategies.olla import order_program, place_program


def test_pictures_show_the_placement() -> None:
    from matplotlib import pyplot

    graph = random_graph(Random(3), 8, updates=True)
    own = store_all(graph)
    best, _ = order_program(graph, own)
    placed, placement = place_program(graph, best)
    listed = [block for block in blocks(graph, placed) if block.size_bytes]
    assert len({(b.tensor, b.begin) for b in listed}) == len(listed)
    assert max((b.offset or 0) + b.size_bytes for b in listed) == placement.peak
    axes = plot_addresses(graph, placed)
    assert sum(len(c) for c in axes.containers) >= len(listed)
    plot_fragmentation(graph, placed)
    plot_lifetimes(graph, placed)
    axes = plot_orders(graph, own, best)
    assert len(axes.lines) == 2
    assert max(axes.lines[1].get_ydata()) <= max(axes.lines[0].get_ydata())
    assert replay(graph, best).peak_bytes <= replay(graph, own).peak_bytes
    pyplot.close("all")


def test_no_placement_is_an_error() -> None:
    graph = random_graph(Random(3), 3)
    with pytest.raises(ValueError, match="place=True"):
        plot_addresses(graph, store_all(graph))
