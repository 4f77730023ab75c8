"""What a forward reads of its inputs' values in Python is part of what a plan is for: calls with
other values have plans of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memopt
from memopt.errors import GuardError
from memopt.pricing.memory import metered
from memopt.torch_private.selections import _unique_of
from tests.users.metering import bytes_over

WORDS = 20


class Reading(nn.Module):
    """Reads values of its words, as `kinds` say."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(WORDS, 8), nn.Linear(8, 8)
        self.last, self.drop = nn.Linear(8, WORDS), nn.Dropout(0.2)

    def forward(self, ids: Tensor) -> Any:
        h = self.drop(self.layer(self.words(ids)).relu())
        return self.last(self.read(h, ids))

    def read(self, h: Tensor, ids: Tensor) -> Tensor:
        raise NotImplementedError


class Branches(Reading):
    def read(self, h: Tensor, ids: Tensor) -> Tensor:
        if ids.max().item() >= WORDS:
            raise ValueError(f"no word {int(ids.max())}")
        mask = ids != 0
        if not mask.all():
            h = h * mask.unsqueeze(-1)
        padded = bool((ids == 0).any())
        h = h * 2 if padded and int(ids.sum()) > 3 else h
        return h + 1 if (ids[0] == 0).any() or (ids[1] == 0).any() else h


class Numbers(Reading):
    def read(self, h: Tensor, ids: Tensor) -> Tensor:
        lengths = (ids != 0).sum(1)
        longest = int(lengths.max())
        means = [row[:n].mean(0) for row, n in zip(h, lengths.tolist(), strict=True)]
        h = functional.pad(h[:, :longest], (0, 0, 0, h.shape[1] - longest))
        for count in torch.bincount(ids.flatten(), minlength=WORDS)[:2].tolist():
            h = h * (1 + count)
        h = h * torch.arange(lengths.max()).sum()
        return h + torch.stack(means).unsqueeze(1)


class Selections(Reading):
    def read(self, h: Tensor, ids: Tensor) -> Tensor:
        mask = ids != 0
        rows, columns = torch.where(mask)
        packed = h[mask] * torch.repeat_interleave(ids[:, 0] + 1, mask.sum(1)).unsqueeze(-1)
        h = h.index_put((rows, columns), packed)
        return h * mask.nonzero().sum() + ids.masked_select(mask).sum() + h[:, mask[0]].mean()


class Changed(Reading):
    """What is read was changed in place, through views of it, too (as SmolVLM does)."""

    def read(self, h: Tensor, ids: Tensor) -> Tensor:
        mask = ids != 0
        mask[0, 0] |= ~torch.any(mask)
        mask[1].logical_and_(mask[2])
        lengths = torch.zeros_like(ids[:, 0])
        lengths[1:] = mask[1:].sum(1)
        lengths += 1
        return h + h[mask].mean() * lengths.tolist()[1]


class Sized(Reading):
    """Tensors of no dimension are sizes (as in Mistral 3)."""

    def read(self, h: Tensor, ids: Tensor) -> Tensor:
        lengths = [row.sum() for row in ids[:2] != 0]
        parts = h.flatten(0, 1).split([*lengths, h.shape[0] * h.shape[1] - sum(lengths)])
        sums = [part.view(n, 8).sum(0) for part, n in zip(parts[:2], lengths, strict=True)]
        return h + torch.stack(sums).sum(0)


class Counted(Reading):
    """A selection by a mask of a hidden state's shape is only counted (as in Voxtral)."""

    def read(self, h: Tensor, ids: Tensor) -> Tensor:
        mask = (ids != 0).unsqueeze(-1).expand_as(h)
        torch._check(h[mask].numel() % 8 == 0)
        return h * mask


class Compared(Reading):
    """A size is also compared."""

    def read(self, h: Tensor, ids: Tensor) -> Tensor:
        longest = int((ids != 0).sum(1)[1:].min())
        kept = h[:, :longest] if longest > 1 else h
        return functional.pad(kept, (0, 0, 0, h.shape[1] - kept.shape[1]))


class Distinct(Reading):
    """Leaves out what is there before; groups rows of one length (as DINO does)."""

    def read(self, h: Tensor, ids: Tensor) -> Tensor:
        mask = ids != 0
        kinds, inverse, counts = mask.t().unique(return_inverse=True, return_counts=True)
        runs, lengths = torch.unique_consecutive(mask[1], return_counts=True)
        bins = torch.bincount((~mask).flatten().long()).sum() + kinds.sum() + runs.sum()
        h = h * counts[inverse].t().unsqueeze(-1) * lengths.prod() + bins
        sizes = torch.tensor([len(row) for row in h])
        start, parts, rows = 0, [], list(h)
        for end in torch.cumsum(torch.unique_consecutive(sizes, return_counts=True)[1], 0):
            parts.append(torch.stack(rows[start:end]))
            start = end
        return torch.cat(parts)


class Lists(Reading):
    """Takes a list as one, and numbers of tensors with one element that have dimensions."""

    def read(self, h: Tensor, ids: Tensor) -> Tensor:
        rows = (ids != 0).sum(1, keepdim=True).tolist()
        h = h * 2 if rows == [[5], [5], [5]] else h
        rows[0].append(int((ids != 0).sum(1)[1:2]))
        return h * sum(rows[0]) * ids[:1, :1].item()


class Texts(Reading):
    """Looks up texts of numbers."""

    def read(self, h: Tensor, ids: Tensor) -> Tensor:
        longest = (ids != 0).sum(1)[1]
        known = {"5": 3, "4": 5}
        h = h * known.get(f"{longest.item()}", 1) + known.get(f"{longest}", 1)
        return h * known.get("{}".format(longest.item()), 1)  # noqa: UP032


class Positions(Reading):
    """Indexes with tensors of one number, sets elements by a mask, and asks for strides."""

    def read(self, h: Tensor, ids: Tensor) -> Tensor:
        mask = ids != 0
        last = mask.sum(1)[1] - 1
        h = h.clone()
        h[mask] += 1
        h = h * mask.nonzero().stride(1) + h[:, last].unsqueeze(1)
        return h * (1 + bool(ids[1, 4] > 0)) * (ids[2, 4] > 0).logical_not().item() + h


class Keeping(Reading):
    """Keeps numbers in its attributes."""

    longest = 0
    padded = False

    def read(self, h: Tensor, ids: Tensor) -> Tensor:
        self.longest = 2 * int((ids != 0).sum(1)[1]) + 1
        self.padded = bool((ids == 0).any())
        return h


def batches() -> list[Tensor]:
    """Calls of two kinds that take turns."""
    found = []
    for number in range(5):
        ids = torch.randint(1, WORDS, (3, 5), generator=torch.Generator().manual_seed(number))
        ids[:, 0] = 3
        if number in (1, 3):
            ids[1, 4] = ids[2, 3] = ids[2, 4] = 0
        found.append(ids)
    found[3][0, :4], found[3][1, :4], found[3][2, :3] = found[1][0, :4], 5, 6
    return found


def trained(model: nn.Module, calls: list[Tensor]) -> list[Any]:
    torch.manual_seed(1)
    found: list[Any] = []
    for ids in calls:
        try:
            loss = model(ids).pow(2).mean()
        except (ValueError, IndexError) as error:
            found.append(f"{type(error).__name__}: {error}")
            continue
        loss.backward()
        found += [loss.detach(), *(one.grad.clone() for one in model.parameters())]
        if isinstance(model, Keeping):
            found.append(torch.tensor([model.longest, model.padded]))
        model.zero_grad()
    return [*found, torch.rand(3)]


def wrapped(kind: type[Reading]) -> nn.Module:
    torch.manual_seed(0)
    return memopt.wrap(kind(), "min", strategy="rotor", progress=False, improve=False)


def check_equal(kind: type[Reading], model: nn.Module, calls: list[Tensor]) -> None:
    torch.manual_seed(0)
    expected, found = trained(kind(), calls), trained(model, calls)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, str):
            assert one == other
        else:
            torch.testing.assert_close(one, other, rtol=0, atol=0)


KINDS = [
    *(Branches, Changed, Counted, Distinct, Numbers, Selections, Sized),
    *(Compared, Lists, Texts, Positions, Keeping),
]


@pytest.mark.parametrize("kind", KINDS)
def test_other_values_have_plans_of_their_own(kind: type[Reading]) -> None:
    model = wrapped(kind)
    check_equal(kind, model, batches())
    calls = memopt.running(model).calls
    assert (calls.planned, calls.original, len(model.plans)) == (5, 0, 2)


def test_an_error_of_the_forward_is_eagers() -> None:
    model = wrapped(Branches)
    bad = batches()[0].clone()
    bad[0, 0] = WORDS
    with pytest.warns(UserWarning, match="an operator fails"):
        check_equal(Branches, model, [batches()[0], bad, batches()[0]])


class Failing(Reading):
    """Fails behind a dropout."""

    def read(self, h: Tensor, ids: Tensor) -> Tensor:
        if (ids == WORDS - 1).any():
            raise ValueError(f"{h.sum().item()}")
        return h


def test_a_first_call_that_fails_draws_as_eager_does() -> None:
    bad = torch.full((3, 5), WORDS - 1)
    check_equal(Failing, wrapped(Failing), [bad, bad, batches()[0], bad])


class Longest(Reading):
    def read(self, h: Tensor, ids: Tensor) -> Tensor:
        return h * int(ids.max())


def test_no_more_than_eight_plans_are_made() -> None:
    model = wrapped(Longest)
    calls = [torch.full((2, 3), number) for number in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 10, 8)]
    with pytest.warns(UserWarning, match=r"int\(ids.max\(\)\).*planned 8, got 9.*torch\.where"):
        check_equal(Longest, model, calls)
    assert len(model.plans) == 8
    calls_made = memopt.running(model).calls
    assert (calls_made.planned, calls_made.original) == (10, 3)


def test_an_applied_plan_names_the_value() -> None:
    model = Longest()
    ids = torch.full((2, 3), 4)
    plan = memopt.plan(model, ids, budget="min", strategy="rotor", progress=False)
    planned = plan.apply(model)
    planned(ids).sum().backward()
    with pytest.raises(GuardError, match=r"int\(ids\.max\(\)\).*planned 4, got 5"):
        planned(ids + 1)
    following = plan.apply(model, on_mismatch="plan")
    following(ids + 1).sum().backward()
    assert memopt.running(following).calls.replanned == 1


def test_a_plan_that_is_made_once_more_gets_the_answers_of_the_first() -> None:
    class Ends(Reading):
        def read(self, h: Tensor, ids: Tensor) -> Tensor:
            return h * 2 if (ids[1:, 0] == 0).any() else h

    torch.manual_seed(0)
    options = {"strategy": "rotor", "progress": False, "improve": False}
    model = memopt.wrap(Ends(), "min", most_plans=3, **options)
    calls = [torch.ones(length, 2).long() for length in (3, 5, 6, 7, 9, 5)]
    for number, ids in enumerate(calls):
        ids[-1] = number % 2
    with pytest.warns(UserWarning, match="plans were made once more"):
        check_equal(Ends, model, calls)
    assert memopt.running(model).calls.planned == len(calls)


class ReadsWhatItChanged(Reading):
    def forward(self, ids: Tensor) -> Any:
        ids.clamp_(max=4)
        return super().forward(ids)

    def read(self, h: Tensor, ids: Tensor) -> Tensor:
        return h * 2 if ids.max() < 5 else h


def test_what_the_forward_has_changed_is_looked_at_in_the_step() -> None:
    model = wrapped(ReadsWhatItChanged)
    check_equal(ReadsWhatItChanged, model, [torch.full((2, 3), number) for number in (3, 7)] * 2)
    assert memopt.running(model).calls.planned == 4


def test_an_applied_plan_leaves_errors_to_the_model() -> None:
    """It was an InputsError."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = memopt.plan(model, torch.ones(2, 4), budget="min", strategy="rotor", progress=False)
    planned = plan.apply(model, on_mismatch="plan")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as eager:
        model(torch.ones(2, 3))
    with pytest.raises(RuntimeError) as found:
        planned(torch.ones(2, 3))
    assert (type(found.value), str(found.value)) == (type(eager.value), str(eager.value))


class Pairs(nn.Module):
    """A look that takes more than the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        above = x[:, None, 0] > x[None, :, 0]
        return self.layer(x) * 2 if above.all() else self.layer(x)


@pytest.mark.parametrize("whole_step", [False, True])
def test_what_a_look_takes_is_charged(whole_step: bool) -> None:
    model, x = Pairs(), torch.randn(600, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(y: Tensor) -> Tensor:
        return y.sum()

    more = {"loss_fn": loss_fn, "optimizer": optimizer, "whole_step": True}
    options: dict[str, Any] = {"strategy": "rotor", "progress": False}
    plan = memopt.plan(model, x, budget="min", **options, **(more if whole_step else {}))
    planned = None if whole_step else plan.apply(model)
    step = plan.train_step(model, loss_fn, optimizer) if whole_step else None
    for _ in range(2):
        with metered(torch.device("cpu")) as used:
            if step is not None:
                step(x)
            elif planned is not None:
                planned(x).sum().backward()
        model.zero_grad()
    assert used.peak_bytes >= 600 * 600
    assert bytes_over(plan, used) <= 0


class _KeptEdges(nn.Module):
    """Drops self-loops, as layers on graphs do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges[:, edges[0] != edges[1]]
        h = self.linear(x)
        return torch.zeros_like(h).index_add(0, target, h[source])


def test_a_value_met_first_under_a_profile_runs_unplanned_and_says_so() -> None:
    """Others of the same shape have plans."""
    model: Any = memopt.wrap(_KeptEdges(), "min", progress=False)

    def step(loops: int) -> None:
        edges = torch.stack([torch.arange(6), (torch.arange(6) >= loops) + torch.arange(6)]) % 6
        model(torch.ones(6, 4), edges).sum().backward()

    for loops in (0, 1, 2):
        step(loops)
    said = r"torch's profiler runs.*profile later steps"
    with metered(torch.device("cpu")), pytest.warns(UserWarning, match=said):
        step(3)
    for loops in (3, 4, 1, 0):
        step(loops)
    assert (model.calls.planned, model.calls.original) == (7, 1)


class _Times(nn.Linear):
    def forward(self, input: Tensor, counts: Tensor | None = None) -> Tensor:
        assert counts is not None
        return super().forward(input) * int(counts.max())


def test_a_plan_of_a_file_needs_inputs_with_the_values(tmp_path: Path) -> None:
    model, given = _Times(4, 4), (torch.randn(2, 4), torch.tensor([3, 2]))
    memopt.plan(model, given, strategy="store-all", progress=False).save(tmp_path / "plan.json")
    with pytest.raises(GuardError, match=r"planned 0, got 3.*apply\(model, inputs=\.\.\.\)"):
        memopt.load(tmp_path / "plan.json").apply(model)(*given)
    planned = memopt.load(tmp_path / "plan.json").apply(model, inputs=given)
    assert torch.equal(planned(*given), model(*given))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 4), (4, 3, 2)])
def test_operators_of_fixed_sizes_are_those_that_they_stand_for(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    for number in range(5):
        draws = torch.Generator().manual_seed(number)
        x = torch.randint(0, 1 + number, shape, generator=draws).to(dtype).transpose(0, -1)
        for function in (torch.unique, torch.unique_consecutive):
            expected = function(x, return_inverse=True, return_counts=True)
            ordered = function is torch.unique
            found = _unique_of(x, ordered, len(expected[0]), inverse=True, counts=True)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other)
                assert (one.dtype, one.stride()) == (other.dtype, other.stride())
