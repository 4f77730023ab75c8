"""Memory that a training loop needs beside a module's step, and that is not in the module's
graph."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import add, attrgetter

from memopt.models.budget import format_bytes


@dataclass(frozen=True, slots=True)
class Charges:
    """Memory charged beside a step's graph. All bytes are at least 0.

    Attributes:
        boundary_bytes: needed by the user's loss between the forward and the backward, beside the
            outputs, their gradients and kept tensors.
        kept_bytes: kept by the loop through a step (of its loss, the last outputs, gradients of
            other calls): resident.
        state_bytes: the optimizer's state: resident.
        forward_bytes: held until the forward returns: the last step's outputs, and
            the buffer in which `fully_shard` gathers.
        held_bytes: held until the backward begins: gradients that are dropped then.
        bucket_bytes: the buckets in which DistributedDataParallel reduces gradients, the shards
            that `fully_shard` keeps beside gathered parameters, the buffers in which a pipeline's
            stage receives: resident.
        waiting_calls: other calls of the model (a pipeline's micro-batches) that await their
            backward; each keeps what the plan keeps between its forward and its backward.
        halved_calls: those of them whose backward is split and half done; each keeps what waits for
            the second half instead.
        added_calls: other calls whose gradients one backward adds up.
        output_calls: other calls for each of which as many bytes are kept as its outputs have:
            outputs that a pipeline collects, or buffers for their gradients.
        joined_calls: calls whose outputs a pipeline joins in one copy once no backward is left.
        kept_graphs: 1 if a backward frees nothing of what the forward has saved (retain_graph).
        kept_gradients: 1 if the second half of a backward keeps its graph, for which it copies the
            parameters' gradients.
        update_bytes: needed by hooks on gradients, beside all of these, once the backward has run:
            by an optimizer that steps there, by DeepSpeed's to reduce gradients.
        given_gradients: 1 if the loop holds, until a backward is over, the gradients of the outputs
            that it gives to it.
    """

    boundary_bytes: int = 0
    kept_bytes: int = 0
    state_bytes: int = 0
    forward_bytes: int = 0
    held_bytes: int = 0
    bucket_bytes: int = 0
    waiting_calls: int = 0
    halved_calls: int = 0
    added_calls: int = 0
    output_calls: int = 0
    joined_calls: int = 0
    kept_graphs: int = 0
    kept_gradients: int = 0
    update_bytes: int = 0
    given_gradients: int = 0

    def __bool__(self) -> bool:
        """Return whether there is anything to charge."""
        return any(_values(self))

    @property
    def resident_bytes(self) -> int:
        """Bytes held from step to step."""
        return self.kept_bytes + self.state_bytes + self.bucket_bytes

    def largest(self, other: Charges) -> Charges:
        """Return the larger of each charge."""
        if other is NO_CHARGES:
            return self
        return other if self is NO_CHARGES else Charges(*map(max, _values(self), _values(other)))

    def plus(self, other: Charges) -> Charges:
        """Return the sum of each charge."""
        if other is NO_CHARGES:
            return self
        return other if self is NO_CHARGES else Charges(*map(add, _values(self), _values(other)))

    def beyond(self, charged: Charges) -> Charges:
        """Return these charges without those that a graph already has. Charges that a graph cannot
        hold (`beside`) stay whole."""
        return Charges(
            max(0, self.boundary_bytes - charged.boundary_bytes),
            max(0, self.kept_bytes - charged.kept_bytes),
            max(0, self.state_bytes - charged.state_bytes),
            self.forward_bytes,
            self.held_bytes,
            max(0, self.bucket_bytes - charged.bucket_bytes),
            self.waiting_calls,
            self.halved_calls,
            self.added_calls,
            self.output_calls,
            self.joined_calls,
            self.kept_graphs,
            self.kept_gradients,
            self.update_bytes,
            max(0, self.given_gradients - charged.given_gradients),
        )

    def beside(self) -> Charges:
        """Return the charges that a graph cannot hold: plans leave room for them."""
        return Charges(
            forward_bytes=self.forward_bytes,
            held_bytes=self.held_bytes,
            waiting_calls=self.waiting_calls,
            halved_calls=self.halved_calls,
            added_calls=self.added_calls,
            output_calls=self.output_calls,
            joined_calls=self.joined_calls,
            kept_graphs=self.kept_graphs,
            kept_gradients=self.kept_gradients,
            update_bytes=self.update_bytes,
        )

    def listed(self) -> list[str]:
        """Return each charge as text, for messages."""
        sizes = (
            (self.boundary_bytes, "the loss between forward and backward"),
            (self.kept_bytes, "what the loop keeps (of its loss, outputs, gradients)"),
            (self.state_bytes, "optimizer state"),
            (self.forward_bytes, "the last outputs (or fully_shard's buffer), in the forward"),
            (self.held_bytes, "gradients that are dropped before the backward"),
            (self.update_bytes, "updates, or ZeRO's buckets, inside the backward"),
            (self.bucket_bytes, "buckets, or fully_shard's shards, or a pipeline's buffers"),
        )
        found = [f"{format_bytes(size)} of {what}" for size, what in sizes if size]
        if self.waiting_calls:
            found.append(f"{self.waiting_calls} more call(s) that await their backward")
        if self.output_calls:
            found.append(f"{self.output_calls} more call(s) with buffers for their outputs")
        if self.joined_calls:
            found.append(f"the outputs of {self.joined_calls} call(s), once more as one")
        if self.kept_graphs:
            found.append("a graph that its backward keeps (retain_graph=True)")
        if self.kept_gradients:
            found.append("gradients, once more, of a second half that keeps its graph")
        if self.given_gradients:
            found.append("the gradients of the outputs, which the loop holds during the backward")
        return found


NO_CHARGES = Charges()
_values = attrgetter(*(field.name for field in fields(Charges)))
