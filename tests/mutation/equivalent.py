"""Mutants that survive because they compute the same: why, by module and change.

Each is a pattern of the changed line, as `Mutant.shown` writes it. A mutant that a test could
notice has no place here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Equivalent:
    """Changes that make no difference.

    Attributes:
        module: the module's last name; "": any.
        change: what `Mutant.shown` must contain, a regular expression.
        reason: why no run differs.
    """

    module: str
    change: str
    reason: str


EQUIVALENTS = (
    Equivalent(
        "",
        r"slots=True\)  ->  .*slots=False\)",
        "the same class, in more memory",
    ),
    Equivalent(
        "link_clock",
        r"(out_free_s|in_free_s|network_free_s|host_free_s): float = 0.0  ->  .* -1.0",
        "what is free before the step is free at its start: the clock is never below 0",
    ),
    Equivalent(
        "lifetimes",
        r"reshape\(-1, 3\)\.T  ->  .*reshape\((~1| -2|- ?2), 3\)\.T",
        "NumPy takes any negative extent for the one to be found",
    ),
    Equivalent(
        "",
        r"first_backward < len\((graph|self.graph).operators\).*  ->  .*first_backward != len",
        "it is the number of operators where there is no backward, at most",
    ),
    Equivalent(
        "bounds",
        r"early \| \(set\(graph.tangents\) & graph.kept\)  ->  .* early \^ ",
        "tangents come from outside, so that no forward operator has written one",
    ),
    Equivalent(
        ".replay",
        r"len\(instruction.outputs\) < len\(chosen.writes\)  ?.*->  .*outputs\) != len",
        "a valid program keeps some of what is written, each once",
    ),
    Equivalent(
        "chain_replay",
        r"step.move is Move.BACKWARD:  ->  .*step.move <= Move.BACKWARD",
        "its letter comes before those of all moves that are not forward",
    ),
    Equivalent(
        "chain_replay",
        r"step.move is Move.DROP_ACTIVATION:  ->  .*step.move <= Move.DROP_ACTIVATION",
        "its name comes before those of the moves that get there",
    ),
    Equivalent(
        "chain_to_graph",
        r"step.move is Move.FORWARD_ALL  ->  .*step.move <= Move.FORWARD_ALL",
        "its name comes before those of the other forward moves",
    ),
    Equivalent(
        "persistent_kernels",
        r"if needed >= out.size:  ->  if needed (is|==|>) out.size:",
        "without the early end, nothing is added: a start is at least what is needed",
    ),
    Equivalent(
        "lower",
        r"step.move is Move.BACKWARD:  ->  .*step.move <= Move.BACKWARD",
        "its letter comes before those of all moves that are not forward",
    ),
    Equivalent(
        "",
        r"(full|zeros)\(\(.*n \+ 2.*  ->  .*n \* 2|c.length \+ 2  ->  .*c.length \* 2",
        "an array that is larger than it need be, or as large as it must",
    ),
    Equivalent(
        "persistent_kernels",
        r"for split in range\(s \+ 1, t \+ 1\):  ->  .*range\(s \+ 0, ",
        "the stages before s of the subchain, none, have no steps",
    ),
    Equivalent(
        "trace_kernels",
        r"if count \+ n \+ .* > codes.size:  ->  if count \* n ",
        "room that grows earlier; while count is 0 or 1 there is enough",
    ),
    Equivalent(
        "floating_kernels",
        r"leaves\), s \+ 1\), last \+ 1\):  ->  .*, s (- 1|\* 1|\+ 0)\), last",
        "H(s, s) has no steps",
    ),
    Equivalent(
        "floating_trace_kernels",
        r"best_unknown = 3  ->  best_unknown = 2",
        "every value that is weighed is below the infinity that it begins with",
    ),
    Equivalent(
        "persistent_trace_kernels",
        r"best_unknown = 3  ->  best_unknown = [24]",
        "every value that is weighed is below the infinity that it begins with",
    ),
    Equivalent(
        "dynprog_kernels",
        r"last = i if new\[OUT\] < 0 else NO_LAST  ->  .*new\[OUT\] <= 0",
        "a copy that ends with F_i: before it there is no time to spare in which x_i could be back",
    ),
    Equivalent(
        "persistent_kernels",
        r"max\(s1, t0 \+ 1\), t \+ 1\)  ->  .*max\(s1, t0 - 1\), t \+ 1\)",
        "a split that is tried twice",
    ),
    Equivalent(
        "steps_kernels",
        r"least \+ tolerance:  ->  .*least - tolerance",
        "the search that is not cut short finds nothing lower",
    ),
    Equivalent(
        "steps_kernels",
        r"index_at\(current.at, start - 1\) \+ 1  ->  .*start - 2",
        "the step at start - 1 is written in the loop instead of before it",
    ),
    Equivalent(
        "steps_kernels",
        r"[ij] \+= next_[ab] == at  ->  .* <= at",
        "`at` is the lesser of the two",
    ),
    Equivalent(
        "steps_kernels",
        r"current.at\[k\] if k < stop else limit  ->  .* if k != stop else",
        "k is at most stop",
    ),
    Equivalent(
        "floating_kernels",
        r"if s \+ 1 < u and .*  ->  if s (\* 1|\+ 0) < u and ",
        "H(s + 1, s + 1) has no steps",
    ),
    Equivalent(
        "floating_kernels",
        r"k \+ left.at.size \+ right.at.size\)  ->  .*left.at.size \* right.at.size\)",
        "a sum of functions of a and b steps has at most a + b - 1, and a · b is no less",
    ),
    Equivalent(
        "schedule_cost_kernels",
        r"(elif|if) move == (DROP_SAVED|FORWARD_ALL):  ->  .* move >= ",
        "its code is the highest that gets there",
    ),
    Equivalent(
        "schedule_cost_kernels",
        r"if move == FORWARD_NO_SAVE:  ->  .* <= FORWARD_NO_SAVE",
        "its code is the lowest",
    ),
    Equivalent(
        "dynprog_kernels",
        r"np.empty\(0, np.int32\)  ->  .*np.empty\( ?1, ",
        "room that grows when it is used up",
    ),
    Equivalent(
        "floating_trace_kernels",
        r"for u in range\(s \+ 1, n \+ 1\):  ->  .*range\(s (\+ 0|\* 1), ",
        "H(s, s) has no steps",
    ),
    Equivalent(
        "floating_trace_kernels",
        r"if s \+ 1 < u:  ->  if s \+ 1 != u:",
        "u is at least s + 1",
    ),
    Equivalent(
        "floating_trace_kernels",
        r"n \+ 1 if s > 1 else 2\):  ->  .* if s != 1 else",
        "s is at least 1",
    ),
    Equivalent(
        "",
        r"kind == 3 and t == last\) or .*  ->  .*kind == 3 and t >= last",
        "t is at most the last stage",
    ),
    Equivalent(
        "floating_kernels",
        r"zero, -FAR, .*  ->  .*zero, (not |\+)FAR,",
        "a function that is 0 everywhere is the same wherever it is shifted",
    ),
    Equivalent(
        "dynprog_kernels",
        r"if out <= 0 and back <= 0:  ->  if out <= 0 and back == 0:",
        "where nothing is late, no operation has waited for room",
    ),
    Equivalent(
        "dynprog_kernels",
        r"while end < count and .*  ->  .*while end is not count",
        "small numbers are one object",
    ),
    Equivalent(
        "dynprog_kernels",
        r"keeping >= count or .*  ->  .*keeping > count",
        "those that offload are done before those that keep",
    ),
    Equivalent(
        "dynprog_kernels",
        r"best, best_idle = 0, np.inf  ->  best, best_idle = ",
        "there is a label, of which the first is taken",
    ),
    Equivalent(
        "ordered_kernels",
        r"gone = j < i and .*  ->  .*gone = j <= i",
        "x_i is there while F_i and B_i read it",
    ),
    Equivalent(
        "floating_trace_kernels",
        r"if s \+ 1 < u:  ->  .*if s \+ 1 == u:",
        "to run on is to keep and then to move on, which needs no more memory",
    ),
    Equivalent(
        "floating_trace_kernels",
        r"if s < last:  ->  if s != last:",
        "s is at most the last stage",
    ),
    Equivalent(
        "floating_trace_kernels",
        r"best = \(-1, 0, 0\)  ->  best = \(- ?2, 0, 0\)",
        "any route below 0 says that nothing fits",
    ),
    Equivalent(
        "floating_trace_kernels",
        r"if best_unknown == 0 and target_unknown == 0 and best_value <= target:  ->  ",
        "the search that is not cut short finds nothing better",
    ),
    Equivalent(
        "validate",
        r"i < boundaries\[0\]:  ->  .* i <= boundaries\[0\]:",
        "a Compute is not the boundary",
    ),
    Equivalent(
        "validate",
        r"elif event == \"(\w+)\":  ->  elif event (<=|>=) ",
        "the other events on that side in the alphabet have branches before this one",
    ),
    Equivalent(
        "validate",
        r"is TensorKind.PARAMETER}  ->  .* >= ",
        "no kind's name comes after it",
    ),
    Equivalent(
        "validate",
        r"is Phase.UPDATE( and|:).*  ->  .*phase >= Phase.UPDATE",
        "the update is the last phase, by name too",
    ),
)


def reason_of(module: str, change: str) -> str | None:
    """Why a surviving mutant is equivalent; None: nothing says that it is."""
    for one in EQUIVALENTS:
        if module.endswith(one.module) and re.search(one.change, change):
            return one.reason
    return None
