"""Every model of the zoo is the architecture it says, and trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.zoo import ALL, FAMILIES, Family, call, get

# torchvision's documented counts; GPT-2, BERT, TinyLlama, Llama and XLM-R as in their model cards
# (heads tied). U-Net, MLP and ResNet-1001 are written here and have no published count to compare
# with: the layers of U-Net and ResNet-1001 are counted below, the MLP has no such test.
PAPER_PARAMETERS = {
    "resnet50": 25_557_032,
    "vgg16": 138_357_544,
    "googlenet": 6_624_904,
    "mobilenet_v2": 3_504_872,
    "densenet121": 7_978_856,
    "efficientnet_b0": 5_288_548,
    "inception_v3": 23_834_568,
    "vit_b_16": 86_567_656,
    "r3d_18": 33_371_472,
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "bert": 109_514_298,
    "llama": 1_100_048_384,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "densenet161": 28_681_000,
    "densenet169": 14_149_480,
    "densenet201": 20_013_928,
    "alexnet": 61_100_840,
    "mnasnet": 4_383_312,
    "googlenet_aux": 13_004_888,
    "inception_v3_aux": 27_161_264,
    "xlm_r": 278_295_186,
    "xlm_r_large": 560_142_482,
    "llama_7b": 6_738_415_616,
}

every_model = pytest.mark.parametrize("family", ALL, ids=str)


@every_model
def test_trains_a_step(family: Family) -> None:
    model = family.build("tiny")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = family.loss(call(model, family.inputs("tiny")))
    assert loss.shape == ()
    loss.backward()
    optimizer.step()
    assert torch.isfinite(loss)
    unused = [name for name, p in model.named_parameters() if p.grad is None]
    assert all("aux" in name for name in unused)
    assert bool(unused) == (family.name == "googlenet_aux_unused")
    for p in model.parameters():
        assert torch.isfinite(p).all()
    # Else comparing gradients would compare zeros.
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert sum(bool(g.any()) for g in gradients) > 0.9 * len(gradients)


@every_model
def test_dropout_is_on_where_the_family_has_it(family: Family) -> None:
    model, inputs = family.build("tiny"), family.inputs("tiny")
    first, second = (family.loss(call(model, inputs)) for _ in range(2))
    assert bool(first != second) == ("dropout" in family.tags)


@every_model
def test_batch_norm_is_where_the_tags_say(family: Family) -> None:
    model = family.build("tiny")
    assert model.training
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert bool(norms) == ("batchnorm" in family.tags)


@pytest.mark.parametrize(("name", "expected"), PAPER_PARAMETERS.items())
def test_paper_size_is_the_published_one(name: str, expected: int) -> None:
    with torch.device("meta"):
        model = get(name).build("paper")
    assert sum(p.numel() for p in model.parameters()) == expected


def test_handwritten_models_have_the_depth_they_say() -> None:
    with torch.device("meta"):
        deep, unet = get("resnet1001").build("paper"), get("unet").build("paper")
    convolutions = [
        name
        for name, m in deep.named_modules()
        if isinstance(m, nn.Conv2d) and "shortcut" not in name
    ]
    assert len(convolutions) + 1 == 1001
    kinds = [type(m) for m in unet.modules()]
    assert kinds.count(nn.Conv2d) + kinds.count(nn.ConvTranspose2d) == 23


@every_model
def test_tied_weights_are_tied(family: Family) -> None:
    model = family.build("tiny")
    names = list(model.named_parameters(remove_duplicate=False))
    tied = len(names) > len(list(model.named_parameters()))
    assert tied == ("tied" in family.tags)


@every_model
def test_the_same_seed_builds_the_same_model(family: Family) -> None:
    state = torch.random.get_rng_state()
    first, second = (family.build("tiny").state_dict() for _ in range(2))
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)
    one, two = family.inputs("tiny"), family.inputs("tiny")
    pairs = zip(*(x.values() if isinstance(x, dict) else x for x in (one, two)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_names() -> None:
    assert len(FAMILIES) == 14
    assert len({family.name for family in ALL}) == len(ALL)
    with pytest.raises(KeyError, match="no model 'resnet'"):
        get("resnet")
