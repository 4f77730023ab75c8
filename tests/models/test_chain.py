"""Chains refuse what cannot be, and chain schedules replay by Table 1."""

import math

import pytest

from memopt.errors import InvalidProgramError
from memopt.models.chain import Chain, Stage
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
