"""A chain as the arrays of Rotor's dynamic programs, every threshold in exact bytes.

Index 0..n throughout; parameter gradients are folded into the gradients: while δ^ℓ is live,
those of the stages above ℓ are live too, so ω̃_δ^ℓ = ω_δ^ℓ + Σ_{k>ℓ} g_k.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memopt.models.chain import Chain

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]


class Options(NamedTuple):
    """The ways to save each stage; the values of stage s and option o are at [s, o].

    Attributes:
        number: how many options each stage has; a chain's own stages have one.
        saved, saved_bytes: ω_ā in slots, rounded up, and in bytes.
        saving: ω_ā + o_f in bytes, the need of F_all, without ω̃_δ.
        reverse: the need of B in bytes, gradients included.
        own_s: u_f of F_all and u_b, together, in seconds.
    """

    number: Int64Array
    saved: Int64Array
    saved_bytes: Int64Array
    saving: Int64Array
    reverse: Int64Array
    own_s: Float64Array


class ChainArrays(NamedTuple):
    """Sizes and thresholds of a chain; a named tuple, because compiled loops accept those.

    Memory `m` of a subchain never counts its input a^{s-1}.

    Attributes:
        length: n, the number of stages.
        slot: bytes of the slot of memory that `output` and `saved` count.
        output, saved: ω_a and ω_ā in slots, rounded up.
        output_bytes, saved_bytes: the same in bytes.
        gradient: ω̃_δ in bytes, the parameter gradients of later stages included.
        first: ω_a^s + o_f^s in bytes, the need of F_ck^s or F_∅^s from a^{s-1}, without ω̃_δ.
        running: ω_a^{j-1} + ω_a^j + o_f^j in bytes, the need of F_∅^j on the way, without ω̃_δ.
        saving: ω_ā^s + o_f^s in bytes, the need of F_all^s, without ω̃_δ.
        reverse: the need of B^s in bytes, gradients included.
        forward_s, backward_s: u_f and u_b in seconds.
        forward_sum_s: prefix sums of u_f.
        options: the ways to save each stage, for the persistent program.
    """

    length: int
    slot: int
    output: Int64Array
    saved: Int64Array
    output_bytes: Int64Array
    saved_bytes: Int64Array
    gradient: Int64Array
    first: Int64Array
    running: Int64Array
    saving: Int64Array
    reverse: Int64Array
    forward_s: Float64Array
    backward_s: Float64Array
    forward_sum_s: Float64Array
    options: Options

    @classmethod
    def of(cls, chain: Chain, slot_bytes: int) -> ChainArrays:
        """Make the arrays of `chain`, with sizes counted in slots of so many bytes."""
        n = len(chain)
        stages = chain.stages
        output = np.array([chain.activation_bytes(i) for i in range(n + 1)], np.int64)
        gradient = np.array([chain.gradient_bytes(i) for i in range(n + 1)], np.int64)
        saved = _padded([stage.saved_bytes for stage in stages])
        overhead = _padded([stage.forward_overhead_bytes for stage in stages])
        no_save = _padded([stage.no_save_overhead_bytes for stage in stages])
        backward = _padded([stage.backward_overhead_bytes for stage in stages])
        parameter = _padded([stage.parameter_gradient_bytes for stage in stages])
        later = parameter.sum() - np.cumsum(parameter)
        forward_s = np.array([0.0, *(stage.forward_time_s for stage in stages)])
        backward_s = np.array([0.0, *(stage.backward_time_s for stage in stages)])
        before = np.concatenate((np.zeros(1, np.int64), output[:-1]))
        gradient_before = np.concatenate((np.zeros(1, np.int64), gradient[:-1]))
        saving = saved + overhead
        reverse = gradient + later + gradient_before + parameter + saved + backward
        return cls(
            length=n,
            slot=slot_bytes,
            output=-(-output // slot_bytes),
            saved=-(-saved // slot_bytes),
            output_bytes=output,
            saved_bytes=saved,
            gradient=gradient + later,
            first=output + no_save,
            running=before + output + no_save,
            saving=saving,
            reverse=reverse,
            forward_s=forward_s,
            backward_s=backward_s,
            forward_sum_s=np.cumsum(forward_s),
            options=options_of(
                np.ones(n + 1, np.int64),
                saved[:, None],
                saving[:, None],
                reverse[:, None],
                (forward_s + backward_s)[:, None],
                slot_bytes,
            ),
        )


def options_of(
    number: Int64Array,
    saved_bytes: Int64Array,
    saving: Int64Array,
    reverse: Int64Array,
    own_s: Float64Array,
    slot: int,
) -> Options:
    """Make options whose sizes are also counted in slots of so many bytes."""
    return Options(number, -(-saved_bytes // slot), saved_bytes, saving, reverse, own_s)


def _padded(values: list[int]) -> Int64Array:
    return np.array([0, *values], np.int64)


def bytes_of_slot(whole_bytes: int, slots: int) -> int:
    """Divide a chain's memory without recomputation (`whole_bytes`) into this many slots; return
    the bytes of one.

    That memory, not the budget: one table then answers every budget, and a larger budget never gets
    a slower plan because its slots are larger. Sizes in slots are rounded up (Rotor §5.2 says down,
    and a plan made that way may exceed its budget).

    Raises:
        ValueError: slots is below 1.
    """
    if slots < 1:
        raise ValueError(f"slots must be at least 1, got {slots}; use None for exact memory")
    return max(1, -(-whole_bytes // slots))
