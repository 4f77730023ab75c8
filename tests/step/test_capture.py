"""The captured graph: what its inputs are, what it holds, which module each operator is from."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from memopt.capture.capture import capture
from memopt.errors import CaptureError
from memopt.models.graph import Phase, TensorKind
from memopt.pricing.memory import metered
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.step.build import Lowering, build
from memopt.step.captured import Captured
from memopt.step.inputs import to_call


def captured(model: nn.Module, *inputs: Tensor) -> tuple[Captured, Lowering]:
    found = capture(model, to_call(inputs))
    return found, build(model, found)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.layers[1].weight = self.layers[0].weight
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        for layer in self.layers:
            y = functional.dropout(layer(y).relu(), 0.5)
        return y


def test_a_capture_copies_no_parameter_and_no_gradient() -> None:
    """An export of dynamo's would copy them all."""
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    x = torch.randn(4, 512)
    model(x).sum().backward()
    with metered(torch.device("cpu")) as use:
        captured(model, x)
    assert 0 < use.peak_bytes < model[0].weight.nbytes / 4


def test_a_capture_that_computes_with_a_buffer_leaves_it_as_it_was() -> None:
    @torch._dynamo.assume_constant_result
    def total(values: Tensor) -> float:
        return float(values.sum())

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("calls", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            calls = self.calls.add_(1)
            return self.linear(x) * total(calls)

    model = Counts()
    found, _ = captured(model, torch.randn(2, 3))
    scales = [node.args[1] for node in found.module.graph.nodes if node.name == "mul"]
    assert scales == [6.0]  # what was computed: with the buffer as the forward makes it
    assert torch.equal(model.calls, torch.ones(3))


def test_primals_are_named() -> None:
    found, _ = captured(Block(), torch.randn(4, 6))
    by_kind: dict[str, list[str]] = {}
    for primal in found.primals:
        by_kind.setdefault(primal.kind, []).append(primal.name)
    assert sorted(by_kind["parameter"]) == [
        "first.bias",
        "first.weight",
        "layers.0.bias",
        "layers.0.weight",
        "layers.1.bias",
        "norm.bias",
        "norm.weight",
    ]
    assert sorted(by_kind["buffer"]) == [
        "norm.num_batches_tracked",
        "norm.running_mean",
        "norm.running_var",
    ]
    assert by_kind["input"] == ["input0"]
    assert sorted(found.primals[i].name for i in found.mutated) == sorted(by_kind["buffer"])


def test_graph_is_forward_then_backward() -> None:
    _, lowering = captured(Block(), torch.randn(4, 6))
    graph = lowering.graph
    phases = [o.phase for o in graph.operators]
    assert phases == sorted(phases, key=lambda p: p is not Phase.FORWARD)
    assert phases.count(Phase.FORWARD) > 5
    assert len({o.name for o in graph.operators}) == len(graph.operators)
    # Every trainable parameter has its gradient, the shared weight one.
    assert len(graph.gradients) == 7
    assert len(graph.tangents) == 1


def test_operators_know_their_module() -> None:
    _, lowering = captured(Block(), torch.randn(4, 6))
    modules = {o.target: o.module for o in lowering.graph.operators if "batch_norm" in o.target}
    assert set(modules.values()) == {"norm"}
    products = [o.module for o in lowering.graph.operators if o.target == "aten.addmm.default"]
    assert products == ["first", "layers.0", "layers.1"]


class Adapted(nn.Module):
    """Looks up what it lacks in the module inside, as PEFT's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_model":
                raise
            return getattr(self.base_model, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base_model(x)
        return y


def test_modules_with_a_lookup_of_their_own_keep_their_names() -> None:
    _, lowering = captured(Adapted(), torch.randn(4, 6))
    found = {o.module for o in lowering.graph.operators if o.phase is Phase.FORWARD}
    assert found == {"base_model.0", "base_model.1"}


def test_resident_bytes_count_everything_once() -> None:
    model, x = Block(), torch.randn(4, 6)
    _, lowering = captured(model, x)
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers(), x)}
    expected = sum(t.untyped_storage().nbytes() for t in tensors.values())
    assert lowering.graph.resident_bytes == expected


def test_blocks_round_sizes_up() -> None:
    model, x = Block(), torch.randn(4, 6)
    found = capture(model, to_call(x))
    graph = build(model, found, block_bytes=512).graph
    assert all(t.size_bytes % 512 == 0 for t in graph.tensors)


def test_views_are_no_operators() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).view(2, 12).t()[1:].unsqueeze(0).expand(3, -1, -1)

    _, lowering = captured(Views(), torch.randn(4, 6))
    forward = [o.target for o in lowering.graph.operators if o.phase is Phase.FORWARD]
    assert forward == ["aten.addmm.default"]
    (output,) = lowering.graph.outputs
    assert lowering.graph.tensors[output].size_bytes == 4 * 6 * 4
    assert lowering.graph.tensors[output].kind is TensorKind.OUTPUT


def test_dead_code_is_left_out_but_draws_stay() -> None:
    class Dead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x.exp()
            torch.rand(3)
            return self.a(x)

    _, lowering = captured(Dead(), torch.randn(4, 6))
    targets = [o.target for o in lowering.graph.operators]
    assert "aten.exp.default" not in targets
    assert "aten.rand.default" in targets


def test_graph_can_be_replayed() -> None:
    _, lowering = captured(Block(), torch.randn(4, 6))
    timeline = replay(lowering.graph, store_all(lowering.graph))
    assert timeline.peak_bytes > lowering.graph.resident_bytes


def test_capture_computes_nothing_and_changes_nothing() -> None:
    model, x = Block(), torch.randn(4, 6)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    captured(model, x)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_capture_under_no_grad_is_of_the_training_step() -> None:
    with torch.no_grad():
        _, lowering = captured(Block(), torch.randn(4, 6))
    assert lowering.graph.gradients


def test_same_model_gives_the_same_graph() -> None:
    torch.manual_seed(0)
    graphs = [captured(Block(), torch.randn(4, 6))[1].graph for _ in range(2)]
    assert graphs[0] == graphs[1]


def test_missing_private_name_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._functorch.aot_autograd as aot

    monkeypatch.delattr(aot, "aot_export_joint_with_descriptors")
    with pytest.raises(CaptureError, match=r"has no torch\._functorch.*supports torch"):
        captured(Block(), torch.randn(4, 6))


def test_the_models_own_warnings_are_passed_on() -> None:
    class Warns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        captured(Warns(), torch.randn(4, 6))


def test_nothing_is_left_in_dynamos_globals() -> None:
    import torch._dynamo.functional_export as module

    captured(Block(), torch.randn(4, 6))
    assert not [name for name in vars(module) if name.startswith("__compiled_fn")]


def test_a_batch_norm_that_averages_over_all_steps_is_named() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None))
    with pytest.raises(CaptureError, match=r"BatchNorm1d '1' has momentum=None.*default is 0\.1"):
        captured(model, torch.randn(4, 6))
    model[1].eval()
    captured(model, torch.randn(4, 6))


@pytest.mark.parametrize("varies", [False, True])
def test_guards_are_compiled_only_where_a_shape_can_vary(
    varies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._dynamo.functional_export as module

    compared: list[Any] = []
    name = "_suggest_or_raise_constraint_violation"
    monkeypatch.setattr(module, name, lambda *args, **kwargs: compared.append(args))

    class Selects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return y[y > 0] if varies else y

    with pytest.raises(CaptureError, match="a shape depends") if varies else nullcontext():
        captured(Selects(), torch.randn(4, 6))
    assert bool(compared) == varies


def test_a_number_read_out_of_a_tensor_is_named_with_its_line() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            number = (x.sum() + lengths.sum()).item()
            return torch._foreach_mul([self.linear(x)], [number])[0]

    with pytest.raises(
        CaptureError, match=r"reads a number out of a tensor at .*lengths\.sum.*the tensor itself"
    ):
        capture(Reads(), to_call((torch.rand(2, 4), torch.tensor([1, 2]))))


def test_the_backward_keeps_no_running_statistics() -> None:
    """It was given the new ones, and does not look at them: they were kept for it."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())
    _, lowering = captured(model, torch.randn(3, 4))
    graph = lowering.graph
    sizes = sorted(graph.tensors[one].size_bytes for one in graph.written_back)
    assert sizes == [8, 24, 24]  # the number of batches, and a mean and a variance of each channel
    frozen = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6).eval())
    _, lowering = captured(frozen, torch.randn(3, 4))
    assert not lowering.graph.written_back
