"""What is mutated, and which tests look at each: the quickest first, for the first that fails ends
a mutant's run."""

from __future__ import annotations

from dataclasses import dataclass

SMALL = "tests/mutation/small_cases.py"
EDGES = ("tests/mutation/test_survivors.py", "tests/mutation/test_edges.py")


@dataclass(frozen=True)
class Target:
    """A module and the tests that answer for it.

    Attributes:
        group: what it is a part of.
        module: its dotted name.
        tests: what pytest is asked to run, in this order.
    """

    group: str
    module: str
    tests: tuple[str, ...]

    @property
    def path(self) -> str:
        """The module's file, from the repository's root."""
        return self.module.replace(".", "/") + ".py"


_RANDOM = "tests/models/test_validate_at_random.py::test_"
_AT_RANDOM = (
    f"{_RANDOM}mutations_of_random_programs_are_named[0]",
    f"{_RANDOM}replay_and_validator_agree_on_random_placements[0]",
    *(f"{_RANDOM}replay_and_validator_agree_on_random_programs[{i}]" for i in range(3)),
)
_IN_PLACE = (
    "tests/programs/test_in_place.py",
    "--deselect=tests/programs/test_in_place.py::test_laws_on_random_programs",
)
_BESIDE = (
    "tests/network/test_replay.py",
    "tests/models/test_moved.py",
    "--deselect=tests/network/test_replay.py::test_memory_is_the_validators",
    "--deselect=tests/models/test_moved.py::test_replay_and_validator_agree_on_random_moves",
)
"""Collectives, and what is moved or updated on the host."""
_VALIDATOR = (*EDGES, "tests/programs/test_validate.py", *_IN_PLACE, *_BESIDE, *_AT_RANDOM)
_REPLAY = (
    *EDGES,
    "tests/programs/test_replay.py",
    *_IN_PLACE,
    *_BESIDE,
    *_AT_RANDOM,
    "tests/strategies/offload/test_replay.py::test_by_hand",
)
_CHAIN = ("tests/models/test_chain.py", "tests/models/test_validate_chain.py")
_LOWERED = "tests/reductions/test_lower.py::test_"
_LOWER = (
    *(f"{_LOWERED}any_schedule_of_any_graph[{i}]" for i in range(60)),
    *(f"{_LOWERED}schedules_with_transfers[{i}]" for i in range(40)),
    *(f"{_LOWERED}random_operators_draw_in_the_graphs_order[{i}]" for i in range(10)),
    f"{_LOWERED}a_moved_stage_by_hand",
    f"{_LOWERED}a_moved_stage_whose_activation_stays",
    f"{_LOWERED}store_all_is_the_frameworks_own_step",
    f"{_LOWERED}a_rerun_stops_before_what_nobody_reads",
    f"{_LOWERED}results_are_written_once",
    f"{_LOWERED}an_invalid_schedule_is_refused",
    f"{_LOWERED}inference",
    f"{_LOWERED}a_step_whose_backward_needs_no_tangents",
    f"{_LOWERED}the_chain_is_no_dearer_than_it_must_be",
    "tests/models/test_backward_stages.py",
)
_CHAINS = "tests/reductions/test_chain_to_graph.py::test_"
_TO_GRAPH = (
    f"{_CHAINS}values_are_counted_on_their_own",
    f"{_CHAINS}the_validator_of_programs_refuses_wrong_schedules",
    f"{_CHAINS}overheads_that_no_operation_has_are_refused",
    f"{_CHAINS}schedules_that_recompute",
    f"{_CHAINS}schedules_with_transfers",
    f"{_CHAINS}the_frameworks_own_order_is_the_papers_baseline",
)
_ROTOR = (
    "tests/strategies/rotor/test_equal_stages.py",
    "tests/strategies/rotor/test_tables.py",
    f"{SMALL}::test_rotor",
    f"{SMALL}::test_rotor_slots",
)
_FLOATING = ("tests/strategies/rotor/test_floating_tables.py", *_ROTOR)
_OFFLOAD = (
    "tests/strategies/offload/test_kernels.py",
    "tests/strategies/offload/test_recurrences.py",
    f"{SMALL}::test_dynprog",
    f"{SMALL}::test_ordered",
)

TARGETS = (
    Target("validator", "memopt.programs.validate", _VALIDATOR),
    Target("validator", "memopt.programs.validate_placement", _VALIDATOR),
    Target("replay", "memopt.programs.replay", _REPLAY),
    Target("replay", "memopt.programs.link_clock", _REPLAY),
    Target("replay", "memopt.programs.lifetimes", _REPLAY),
    Target("replay", "memopt.reductions.chain_replay", _CHAIN),
    Target("bounds", "memopt.models.bounds", (*EDGES, "tests/models/test_bounds.py")),
    Target("lowering", "memopt.reductions.lower", _LOWER),
    Target("lowering", "memopt.reductions.chain_to_graph", _TO_GRAPH),
    Target("dynamic programs", "memopt.strategies.rotor.persistent_kernels", _ROTOR),
    Target("dynamic programs", "memopt.strategies.rotor.persistent_trace_kernels", _ROTOR),
    Target("dynamic programs", "memopt.strategies.rotor.steps_kernels", _FLOATING),
    Target("dynamic programs", "memopt.strategies.rotor.schedule_cost_kernels", _ROTOR),
    Target("dynamic programs", "memopt.strategies.rotor.floating_kernels", _FLOATING),
    Target("dynamic programs", "memopt.strategies.rotor.floating_trace_kernels", _FLOATING),
    Target("dynamic programs", "memopt.strategies.offload.dynprog_kernels", _OFFLOAD),
    Target("dynamic programs", "memopt.strategies.offload.ordered_kernels", _OFFLOAD),
)
