"""Chains refuse what cannot be, and chain schedules replay by Table 1."""

import math
from random import Random

import pandas
import pytest

from memopt.errors import InvalidProgramError
from memopt.models.chain import Chain, Stage
from memopt.models.generate import random_chain
from memopt.models.instances import rotor_toy
from memopt.models.steps import ChainStep, Move
from memopt.reductions.chain_replay import ChainState, replay_chain

STAGE = Stage(1.0, 2.0, 3, 4, 5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Stage(-1, 0, 0, 0, 0), "Stage: forward_time_s must be a finite number"),
        (lambda: Stage(0, math.nan, 0, 0, 0), "Stage: backward_time_s must be a finite number"),
        (lambda: Stage(0, 0, -1, 0, 0, name="conv"), "Stage 'conv': output_bytes must be at l"),
        (lambda: Stage(0, 0, 0, 0.5, 0), "saved_bytes must be a whole number"),
        (lambda: Stage(0, 0, 0, 0, -3), "gradient_bytes must be at least 0"),
        (lambda: Stage(0, 0, 0, 0, 0, 0.5), "forward_overhead_bytes must be a whole number"),
        (lambda: Stage(0, 0, 0, 0, 0, 0, "1"), "forward_no_save_overhead_bytes must be a whole"),
        (lambda: Stage(0, 0, 0, 0, 0, 0, 0, True), "backward_overhead_bytes must be a whole"),
        (lambda: Stage(0, 0, 0, 0, 0, 0, 0, 0, -1), "parameter_gradient_bytes must be at least"),
        (lambda: Chain(-1, [STAGE]), "Chain: input_bytes must be at least 0"),
        (lambda: Chain(0, []), "at least one stage is needed"),
        (lambda: Chain(0, [(1, 2)]), "stages must be memopt.Stage values"),
        (lambda: Chain(0, [STAGE], -1), "resident_bytes must be at least 0"),
        (lambda: Chain(0, [STAGE], 0, 1.0), "input_gradient_bytes must be a whole number"),
    ],
)
def test_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_what_papers_need_is_accepted():
    # Rotor Table 2, stage 4: ω_ā < ω_a; negative o_b comes with parameter gradients.
    assert rotor_toy().stages[3].saved_bytes < rotor_toy().stages[3].output_bytes
    assert Stage(0, 0, 1, 0, 0, -1, -2, -3).backward_overhead_bytes == -3


def test_no_save_overhead_defaults_to_the_saving_one():
    assert Stage(0, 0, 0, 0, 0, 7).no_save_overhead_bytes == 7
    assert Stage(0, 0, 0, 0, 0, 7, 0).no_save_overhead_bytes == 0


def test_accessors():
    chain = Chain(10, iter([STAGE, Stage(0, 0, 6, 7, 8)]), 9, 11)
    assert len(chain) == 2
    assert [chain.activation_bytes(i) for i in range(3)] == [10, 3, 6]
    assert [chain.gradient_bytes(i) for i in range(3)] == [11, 5, 8]
    assert chain.compute_time_s == 3
    assert chain == Chain(10, (STAGE, Stage(0, 0, 6, 7, 8)), 9, 11)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([(Move.OFFLOAD, 1)], "offload.1: transfers are not part"),
        ([(Move.FORWARD_ALL, 3)], "the chain has stages 1 to 2"),
        ([(Move.FORWARD_ALL, 2)], r"a\^1 is not in memory"),
        ([(Move.FORWARD_CHECKPOINT, 1)] * 2, "already in memory"),
        ([(Move.FORWARD_NO_SAVE, 1)], r"no a\^0 of its own to drop"),
        ([(Move.FORWARD_ALL, 1), (Move.FORWARD_NO_SAVE, 2)], r"no a\^1 of its own to drop"),
        ([(Move.DROP_ACTIVATION, 1)], "the value is not in memory"),
        ([(Move.DROP_SAVED, 1)], "the value is not in memory"),
        ([(Move.FORWARD_ALL, 1), (Move.BACKWARD, 1)], "δ.1 is not in memory"),
        ([(Move.FORWARD_CHECKPOINT, 1), (Move.BACKWARD, 2)], "ā.2 is not in memory"),
        ([(Move.FORWARD_ALL, 1)], "the schedule ends before B.1"),
        ([], "the schedule ends before B.1"),
    ],
)
def test_schedules_that_cannot_run(words, message):
    with pytest.raises(InvalidProgramError, match=message):
        replay_chain(Chain(0, [STAGE, STAGE]), [ChainStep(*word) for word in words])


def test_a_refused_step_leaves_the_state_as_it_was():
    state = ChainState(Chain(0, [STAGE, STAGE]))
    state.apply(ChainStep(Move.FORWARD_ALL, 1))
    before = (set(state.activations), set(state.saved), state.gradient, state.live_bytes)
    for stage in (0, 1, 2, 3):
        for move in (Move.FORWARD_NO_SAVE, Move.BACKWARD, Move.DROP_ACTIVATION, Move.PREFETCH):
            with pytest.raises(InvalidProgramError):
                state.apply(ChainStep(move, stage))
    assert (state.activations, state.saved, state.gradient, state.live_bytes) == before


def test_steps_print_as_in_the_paper():
    assert str(ChainStep(Move.FORWARD_NO_SAVE, 3)) == "F∅^3"


def test_notebooks_show_it_escaped_and_short() -> None:
    stages = [Stage(1.0, 2.0, 8, 16, 8, name="<b>") for _ in range(70)]
    html = Chain(4, stages, resident_bytes=2048)._repr_html_()
    assert "<b>memopt chain</b> of 70 stages" in html
    assert "&lt;b&gt;" in html
    assert "10 more" in html
    assert "2.0 KiB" in html
    assert html.count("<table>") == html.count("</table>") == 2


def test_a_stage_saves_its_output_unless_it_says_more():
    stage = Stage(forward_time_s=1, backward_time_s=2, output_bytes=7)
    assert (stage.saved_bytes, stage.gradient_bytes) == (7, 7)
    assert stage == Stage(1, 2, 7, 7, 7)
    assert Stage(1, 2, 7, gradient_bytes=0).gradient_bytes == 0


def test_a_homogeneous_chain():
    chain = Chain.homogeneous(4, output_bytes=10, saved_bytes=30, resident_bytes=5)
    assert [stage.saved_bytes for stage in chain.stages] == [30, 30, 30, 0]
    assert (len(chain), chain.input_bytes, chain.resident_bytes) == (4, 10, 5)
    assert chain.compute_time_s == 9
    with pytest.raises(ValueError, match="length must be at least 2, got 1"):
        Chain.homogeneous(1)


def test_a_random_chain_is_that_of_its_seed():
    assert Chain.random(3) == Chain.random(3) == random_chain(Random(3), 10)
    assert Chain.random(3) != Chain.random(4)
    assert len(Chain.random(3, 5, shape="sparse")) == 5
    with pytest.raises(ValueError, match="'wide' is not a valid Shape"):
        Chain.random(3, shape="wide")
    with pytest.raises(ValueError, match="at least one stage"):
        Chain.random(3, 0)


TABLE = """name, forward_time_s, backward_time_s, output_bytes, saved_bytes
conv, 1e-3, 2e-3, 1e6, 3000000
pool, 0.5, 0.5, 10,
loss, 0, 0, 0, 0
"""
ROWS = Chain(
    8,
    [
        Stage(1e-3, 2e-3, 10**6, 3 * 10**6, name="conv"),
        Stage(0.5, 0.5, 10, name="pool"),
        Stage(0, 0, 0, name="loss"),
    ],
)


def test_a_chain_from_a_table(tmp_path):
    path = tmp_path / "chain.csv"
    path.write_text(TABLE)
    assert Chain.from_table(path, input_bytes=8) == ROWS
    frame = pandas.read_csv(path, skipinitialspace=True)
    assert frame["saved_bytes"].dtype == float
    assert Chain.from_table(frame, input_bytes=8) == ROWS
    assert Chain.from_table(frame.astype({"saved_bytes": "Int64"}), input_bytes=8) == ROWS
    assert Chain.from_table(frame.to_dict("records"), input_bytes=8) == ROWS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("forward_time_s", "forward"), "row 1: there is no field 'forward'; the columns are for"),
        (("0.5, 0.5", "0.5, "), "row 2: backward_time_s is missing"),
        (("1e6", "much"), "row 1: output_bytes is no number: 'much'"),
        (("1e6", "1.5"), "row 1: Stage 'conv': output_bytes must be a whole number"),
        (("0.5, 0.5", "-1, 0.5"), "row 2: Stage 'pool': forward_time_s must be"),
    ],
)
def test_a_wrong_table_is_refused_by_its_row(tmp_path, change, message):
    path = tmp_path / "chain.csv"
    path.write_text(TABLE.replace(*change))
    with pytest.raises(ValueError, match=message):
        Chain.from_table(path)


def test_what_is_no_table_is_refused():
    with pytest.raises(ValueError, match="a CSV file, a data frame or rows are needed: int"):
        Chain.from_table(3)
    with pytest.raises(ValueError, match="row 1: a mapping from columns to values is needed"):
        Chain.from_table([1])
