"""The checker of chain schedules against mutations, and against replay_chain."""

from random import Random

import pytest

from memopt.errors import InvalidProgramError
from memopt.models.chain import Chain, Stage
from memopt.models.generate import random_chain
from memopt.models.steps import FORWARD_MOVES, ChainStep, Move
from memopt.programs.violations import ViolationCode
from memopt.reductions.chain_replay import ChainState, replay_chain
from tests.models.validate_chain import chain_memory_use, validate_chain

Code = ViolationCode

WORDS = {
    "∅": Move.FORWARD_NO_SAVE,
    "ck": Move.FORWARD_CHECKPOINT,
    "all": Move.FORWARD_ALL,
    "B": Move.BACKWARD,
    "drop": Move.DROP_ACTIVATION,
    "dropsaved": Move.DROP_SAVED,
    "offload": Move.OFFLOAD,
    "prefetch": Move.PREFETCH,
}


def schedule(text: str) -> list[ChainStep]:
    """ "ck1 ∅2 all3": one word a step, its stage last."""
    return [ChainStep(WORDS[word[:-1]], int(word[-1])) for word in text.split()]


# Three stages, everything different, by hand; resident 1000, input 10.
CHAIN = Chain(
    10,
    [
        Stage(1, 2, 20, 25, 21, 1, 2, 3, 100),
        Stage(1, 2, 30, 37, 31, 4, None, 5, 200),
        Stage(1, 2, 40, 49, 41, 6, 7, -8, 300),
    ],
    1000,
    11,
)


def test_store_all_by_hand():
    steps = schedule("all1 all2 all3 B3 B2 B1")
    held = 1000 + 10 + 41
    during = [
        held + 25 + 1,
        held + 25 + 37 + 4,
        held + 25 + 37 + 49 + 6,
        held + 25 + 37 + 49 + 31 + 300 - 8,
        1010 + 25 + 37 + 31 + 300 + 21 + 200 + 5,
        1010 + 25 + 21 + 500 + 11 + 100 + 3,
    ]
    assert chain_memory_use(CHAIN, steps) == during
    timeline = replay_chain(CHAIN, steps)
    assert timeline.step_bytes == tuple(during)
    assert timeline.peak_bytes == 1670
    assert timeline.time_s == 9


def test_recomputing_by_hand():
    steps = schedule("ck1 ∅2 all3 B3 ck1 all2 B2 all1 B1")
    during = [
        1051 + 20 + 2,
        1051 + 20 + 30 + 4,
        1051 + 30 + 49 + 6,
        1051 + 30 + 49 + 31 + 300 - 8,
        1010 + 31 + 300 + 20 + 2,
        1010 + 31 + 300 + 20 + 37 + 4,
        1010 + 31 + 300 + 20 + 37 + 21 + 200 + 5,
        1010 + 21 + 500 + 25 + 1,
        1010 + 21 + 500 + 25 + 11 + 100 + 3,
    ]
    assert chain_memory_use(CHAIN, steps) == during
    assert replay_chain(CHAIN, steps).step_bytes == tuple(during)


GOOD = "ck1 ∅2 all3 B3 ck1 all2 B2 all1 B1"

MUTATIONS = [
    ("a transfer", GOOD + " offload1", Code.UNKNOWN_INSTRUCTION, 9),
    ("stage 0", "∅0 " + GOOD, Code.UNKNOWN_STAGE, 0),
    ("stage 4", GOOD + " all4", Code.UNKNOWN_STAGE, 9),
    ("drops the input", "drop0 " + GOOD, Code.UNKNOWN_STAGE, 0),
    ("F∅ of stage 1 frees the input", "∅1 " + GOOD[4:], Code.RESULT_FREED, 0),
    ("input not computed", GOOD[4:], Code.READ_ABSENT, 0),
    ("input dropped", "ck1 drop1 " + GOOD[4:], Code.READ_ABSENT, 2),
    ("F∅ without an input of its own", "all1 ∅2 all3 B3 B2 B1", Code.READ_ABSENT, 1),
    ("nothing saved", "ck1 ck2 ck3 B3", Code.READ_ABSENT, 3),
    ("saved values dropped", "all1 all2 all3 dropsaved3 B3", Code.READ_ABSENT, 4),
    ("backward out of order", "all1 all2 all3 B2 B3 B1", Code.READ_ABSENT, 3),
    ("backward twice", "all1 all2 all3 B3 all3 B3", Code.READ_ABSENT, 5),
    ("computed twice", "ck1 ck1 " + GOOD[4:], Code.COMPUTED_WHILE_LIVE, 1),
    ("saved twice", "all1 all1 all2 all3 B3 B2 B1", Code.COMPUTED_WHILE_LIVE, 1),
    ("dropped twice", GOOD + " drop2", Code.FREED_ABSENT, 9),
    ("saved dropped twice", GOOD + " dropsaved1", Code.FREED_ABSENT, 9),
    ("no B^1", GOOD[:-3], Code.UNFINISHED, 8),
    ("nothing", "", Code.UNFINISHED, 0),
]


@pytest.mark.parametrize(
    ("text", "code", "step"), [row[1:] for row in MUTATIONS], ids=[row[0] for row in MUTATIONS]
)
def test_mutation(text, code, step):
    violation = validate_chain(CHAIN, schedule(text))
    assert (violation.code, violation.instruction) == (code, step)
    if code is not Code.UNKNOWN_STAGE or "0" not in text:
        with pytest.raises(InvalidProgramError):
            replay_chain(CHAIN, schedule(text))


def test_budget_is_exact():
    steps = schedule(GOOD)
    peak = replay_chain(CHAIN, steps).peak_bytes
    assert validate_chain(CHAIN, steps, peak) is None
    over = validate_chain(CHAIN, steps, peak - 1)
    assert over.code is Code.OVER_BUDGET
    assert "1 too many" in over.message


def random_schedule(rng: Random, chain: Chain) -> list[ChainStep]:
    """A random walk over all possible steps, ending with B^1."""
    state = ChainState(chain)
    steps: list[ChainStep] = []
    moves = [*FORWARD_MOVES, *FORWARD_MOVES, Move.DROP_ACTIVATION, Move.DROP_SAVED]
    while state.gradient:
        needed = [ChainStep(Move.BACKWARD, state.gradient)]
        if state.gradient not in state.saved or rng.random() < 0.3:
            high = state.gradient if len(steps) > 40 else len(chain)
            needed = [ChainStep(rng.choice(moves), rng.randint(1, high))]
        try:
            state.apply(needed[0])
        except InvalidProgramError:
            continue
        steps += needed
    return steps


@pytest.mark.parametrize("block", range(10))
def test_replay_and_validator_agree_on_random_schedules(block):
    for seed in range(block * 40, block * 40 + 40):
        rng = Random(seed)
        chain = random_chain(
            rng,
            rng.randint(1, 6),
            parameter_gradients=rng.random() < 0.5,
            negative_overheads=rng.random() < 0.3,
            resident_bytes=rng.randint(0, 9),
        )
        steps = random_schedule(rng, chain)
        timeline = replay_chain(chain, steps)
        assert timeline.step_bytes == tuple(chain_memory_use(chain, steps)), seed
        assert validate_chain(chain, steps, timeline.peak_bytes) is None, seed
        over = validate_chain(chain, steps, timeline.peak_bytes - 1)
        assert over.code is Code.OVER_BUDGET, seed


def refusal(chain: Chain, steps: list[ChainStep]) -> str | None:
    """What replay_chain says against a schedule."""
    try:
        replay_chain(chain, steps)
    except InvalidProgramError as error:
        return str(error)
    return None


@pytest.mark.parametrize("block", range(10))
def test_both_refuse_the_same_mutated_schedules(block):
    for seed in range(block * 40, block * 40 + 40):
        rng = Random(seed)
        chain = random_chain(rng, rng.randint(1, 5))
        steps = random_schedule(rng, chain)
        for _ in range(10):
            position = rng.randrange(len(steps))
            mutated = [*steps[:position], *steps[position + rng.randint(0, 1) :]]
            if rng.random() < 0.5:
                other = rng.choice(steps)
                mutated.insert(rng.randint(0, len(mutated)), other)
            violation = validate_chain(chain, mutated)
            refused = refusal(chain, mutated)
            assert (violation is None) == (refused is None), (seed, violation, refused)
            if violation is not None and violation.code is not Code.UNFINISHED:
                assert str(mutated[violation.instruction]) in refused, (seed, violation)
