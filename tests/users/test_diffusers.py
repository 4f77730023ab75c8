"""Training loops of diffusers' scripts (accelerate, frozen encoders, adapters, averaged weights)
around planned models: 20 steps, every loss and weight bit for bit, every peak within the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import diffusers
import peft
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from diffusers import optimization, training_utils
from torch import Tensor, nn

import memopt
from memopt.step.backend import backend_of
from tests.users.metering import StepMeter

STEPS = 20
CPU = backend_of(torch.device("cpu"))
DRAWS = diffusers.DDPMScheduler(num_train_timesteps=1000)


@pytest.fixture(autouse=True)
def own_state() -> Iterator[None]:
    """accelerate keeps one state for a process."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def conditional_unet() -> nn.Module:
    made: nn.Module = diffusers.UNet2DConditionModel(
        sample_size=16,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(16, 32),
        layers_per_block=1,
        cross_attention_dim=16,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    return made


def plain_unet() -> nn.Module:
    made: nn.Module = diffusers.UNet2DModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return made


def flux() -> nn.Module:
    made: nn.Module = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )
    return made


def adapted(make: Callable[[], nn.Module], *targets: str) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model: Any = make().requires_grad_(False)
        config = peft.LoraConfig(
            r=4, lora_alpha=4, init_lora_weights="gaussian", target_modules=list(targets)
        )
        model.add_adapter(config)
        return model  # type: ignore[no-any-return]

    return made


def encoder() -> Any:
    torch.manual_seed(1)
    return diffusers.AutoencoderKL(
        block_out_channels=[8, 16],
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        norm_num_groups=8,
    ).requires_grad_(False)


def text_to_image(model: nn.Module, batch: Tensor) -> Tensor:
    """Of `train_text_to_image[_lora].py`, with noise offset and min-SNR weights."""
    images, texts = batch[:, :3], batch[:, 3].flatten(1)[:, : 7 * 16].unflatten(1, (7, 16))
    latents = encoder().encode(images).latent_dist.sample() * 0.18
    noise = torch.randn_like(latents) + 0.1 * torch.randn(len(latents), 4, 1, 1)
    times = torch.randint(0, 1000, (len(latents),))
    found = model(DRAWS.add_noise(latents, noise, times), times, texts, return_dict=False)[0]
    ratios = training_utils.compute_snr(DRAWS, times)
    weights = torch.stack([ratios, 5.0 * torch.ones_like(times)], dim=1).amin(dim=1) / ratios
    losses = F.mse_loss(found.float(), noise.float(), reduction="none")
    return (losses.mean(dim=list(range(1, losses.ndim))) * weights).mean()


def unconditional(model: nn.Module, batch: Tensor) -> Tensor:
    """Of `train_unconditional.py`."""
    clean = batch[:, :3, ::2, ::2].contiguous()
    noise, times = torch.randn_like(clean), torch.randint(0, 1000, (len(clean),))
    found = model(DRAWS.add_noise(clean, noise, times), times).sample
    return F.mse_loss(found.float(), noise.float())


def dreambooth_flux(model: nn.Module, batch: Tensor) -> Tensor:
    """Of `train_dreambooth_lora_flux.py`."""
    own, scheduler = diffusers.FluxPipeline, diffusers.FlowMatchEulerDiscreteScheduler()
    clean = batch[:, :, ::4, ::4].contiguous()
    noise, count = torch.randn_like(clean), len(clean)
    shares = training_utils.compute_density_for_timestep_sampling(
        "logit_normal", count, logit_mean=0.0, logit_std=1.0, mode_scale=1.29
    )
    drawn = (shares * 1000).long()
    sigmas = scheduler.sigmas[drawn].view(-1, 1, 1, 1)
    found = model(
        hidden_states=own._pack_latents((1 - sigmas) * clean + sigmas * noise, count, 4, 8, 8),
        timestep=scheduler.timesteps[drawn] / 1000,
        guidance=torch.tensor([3.5]).expand(count),
        pooled_projections=torch.randn(count, 32),
        encoder_hidden_states=torch.randn(count, 5, 32),
        txt_ids=torch.zeros(5, 3),
        img_ids=own._prepare_latent_image_ids(count, 4, 4, "cpu", torch.float32),
        return_dict=False,
    )[0]
    found = own._unpack_latents(found, height=64, width=64, vae_scale_factor=8)
    weights = training_utils.compute_loss_weighting_for_sd3("none", sigmas=sigmas)
    errors = weights.float() * (found.float() - (noise - clean).float()) ** 2
    return errors.reshape(count, -1).mean(1).mean()


@dataclass(frozen=True)
class Script:
    """A model, its loss, and how the script trains it."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor], Tensor]
    accumulates: int = 1
    averages: bool = False
    precision: str | None = None


SCRIPTS = {
    "flux-lora": Script(adapted(flux, "attn.to_k", "attn.to_q", "ff.net.0.proj"), dreambooth_flux),
    "flux-bfloat16": Script(
        adapted(flux, "attn.to_k", "attn.add_k_proj"), dreambooth_flux, 2, precision="bf16"
    ),
    "text-to-image": Script(conditional_unet, text_to_image, 2, averages=True),
    "text-to-image-lora": Script(adapted(conditional_unet, "to_k", "to_v"), text_to_image, 2),
    "unconditional": Script(plain_unet, unconditional, averages=True),
}


def trained(
    script: Script, steps: int, meter: StepMeter | None, **asked: Any
) -> tuple[list[Tensor], nn.Module, list[int]]:
    """Losses and averaged weights, the model, and what each planned step took above its budget."""
    torch.manual_seed(0)
    model = script.model()
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = torch.optim.AdamW(weights, lr=1e-3)
    averages = training_utils.EMAModel(model.parameters()) if script.averages else None
    data: Any = torch.utils.data.DataLoader(list(torch.randn(8, 4, 32, 32)), batch_size=2)  # type: ignore[arg-type]
    if asked:
        memopt.wrap(model, optimizer=optimizer, improve=False, **asked)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=script.accumulates,
        mixed_precision=script.precision,
    )
    rates: Any = optimization.get_scheduler(
        "cosine", optimizer, num_warmup_steps=2, num_training_steps=steps
    )
    model, optimizer, data, rates = accelerator.prepare(model, optimizer, data, rates)
    torch.manual_seed(3)
    losses, over = list[Tensor](), list[int]()
    while len(losses) < steps:
        for batch in data:
            with accelerator.accumulate(model):
                if meter is not None and asked:
                    meter.begin()
                loss = script.loss(model, batch)
                accelerator.backward(loss)
                if meter is not None and asked:
                    plan = model.memopt.plans[-1]  # type: ignore[union-attr]
                    # Charged: the last step's loss, which this loop drops, and a step's scalars.
                    twice = plan.loss_bytes + CPU.step_scalars_bytes
                    over.append(meter.end(plan) - twice)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(weights, 1.0)
                optimizer.step()
                rates.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and averages is not None:
                averages.step(model.parameters())
            losses.append(loss.detach().clone())
            del loss
    return losses + (averages.shadow_params if averages else []), model, over


def check(script: Script, steps: int, meter: StepMeter | None, **asked: Any) -> None:
    wanted, reference, _ = trained(script, steps, None)
    found, model, over = trained(script, steps, meter, budget="min", **asked)
    assert all(map(torch.equal, found, wanted))
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert model.memopt.calls.planned == steps  # type: ignore[union-attr]
    assert max(over, default=0) <= 0


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = StepMeter(monkeypatch, from_call=True)
    check(SCRIPTS[name], STEPS, meter, time_limit_s=5)


def test_a_few_steps_of_a_transformer() -> None:
    check(SCRIPTS["flux-lora"], 4, None, strategy="rotor")
