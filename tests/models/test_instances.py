"""The described instances have the optima they are said to have."""

import pytest

import memopt
from memopt.models.instances import (
    FIGURE_4_BUDGET_BYTES,
    MEGABYTE,
    ROTOR_TOY_OPTIMA,
    THREE_LAYERS_PEAK_BYTES,
    figure_4_makespans,
    partition_makespan,
    rotor_figure_4,
    rotor_partition,
    rotor_toy,
    three_layers,
)
from memopt.models.steps import ChainStep, Move
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.reductions.chain_replay import replay_chain

from .chain_search import best_makespan


def store_all_steps(length):
    forward = [ChainStep(Move.FORWARD_ALL, stage) for stage in range(1, length + 1)]
    return forward + [ChainStep(Move.BACKWARD, stage) for stage in range(length, 0, -1)]


def test_toy_store_all_is_as_the_paper_says():
    timeline = replay_chain(rotor_toy(), store_all_steps(7))
    assert timeline.peak_bytes == round(106.99 * MEGABYTE)
    assert timeline.time_s * 1000 == pytest.approx(37.38)


def test_toy_schedule_of_the_paper_for_90_megabytes():
    # Rotor §3.2; the paper prints 86.8 MB and 47.4 ms.
    text = "ck1 ∅2 ∅3 all4 all5 all6 all7 B7 B6 B5 B4 ck1 ∅2 all3 B3 all1 all2 B2 B1"
    moves = {
        "ck": Move.FORWARD_CHECKPOINT,
        "∅": Move.FORWARD_NO_SAVE,
        "all": Move.FORWARD_ALL,
        "B": Move.BACKWARD,
    }
    steps = [ChainStep(moves[word[:-1]], int(word[-1])) for word in text.split()]
    timeline = replay_chain(rotor_toy(), steps)
    assert timeline.peak_bytes == round(86.75 * MEGABYTE)
    assert timeline.time_s * 1000 == pytest.approx(47.42)


@pytest.mark.parametrize(("budget_mb", "makespan_ms"), ROTOR_TOY_OPTIMA)
def test_toy_trade_off_curve(budget_mb, makespan_ms):
    budget = round(budget_mb * MEGABYTE)
    assert best_makespan(rotor_toy(), budget) * 1000 == pytest.approx(makespan_ms)
    slower = [b for b, _ in ROTOR_TOY_OPTIMA if b < budget_mb]
    below = best_makespan(rotor_toy(), budget - 1)
    assert below is None if not slower else below * 1000 > makespan_ms + 0.001


@pytest.mark.parametrize("n", [3, 5])
def test_figure_4(n):
    optima = figure_4_makespans(n)
    assert best_makespan(rotor_figure_4(n), FIGURE_4_BUDGET_BYTES) == min(optima.values())


def test_figure_4_with_drops_at_any_time():
    assert best_makespan(rotor_figure_4(4), FIGURE_4_BUDGET_BYTES, drops=True) == 2 * 4


@pytest.mark.parametrize(
    ("values", "splits"), [((1, 1, 2), True), ((2, 1, 1), True), ((1, 1, 4), False)]
)
def test_partition(values, splits):
    chain, budget = rotor_partition(values)
    best = best_makespan(chain, budget)
    assert (best is not None and best <= partition_makespan(values)) == splits


def test_three_layers_by_hand():
    assert replay(three_layers(), store_all(three_layers())).peak_bytes == THREE_LAYERS_PEAK_BYTES


def test_instances_refuse_what_they_are_not_made_for():
    with pytest.raises(ValueError, match="at least 3"):
        rotor_figure_4(2)
    with pytest.raises(ValueError, match="even sum"):
        rotor_partition((1, 2))


@pytest.mark.parametrize(
    ("name", "strategy", "time_s"),
    [
        ("rotor-toy", "rotor-optimal", 47.42e-3),
        ("rotor-figure-4", "rotor", 16.0),
        ("rotor-figure-4", "rotor-optimal", 14.0),
        ("rotor-partition", "rotor-free", 20.0),
        ("offload-three-partition", "offload-exact", 4.0),
        ("three-layers", "store-all", 11.0),
    ],
)
def test_the_papers_instances_by_name(name, strategy, time_s):
    one = memopt.instances()[name]
    plan = memopt.plan(
        one.model,
        budget=one.budget_bytes,
        strategy=strategy,
        device=one.device,
        progress=False,
    )
    assert plan.step_time_s == pytest.approx(time_s)


def test_instances_say_where_they_are_from():
    for name, one in memopt.instances().items():
        assert one.name == name
        assert one.source
        assert one.known
