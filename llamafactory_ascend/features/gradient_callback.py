"""Gathering the first gradients of all ranks with one collective and one device synchronisation."""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback

from llamafactory_ascend.features.gradient_audit import Gradient, judge, partner_of
from llamafactory_ascend.features.layers import component_of, plain_name

if TYPE_CHECKING:
    from llamafactory_ascend.run import Run

NO_TENSOR = -1.0
TOKEN_IDS = {
    "vision": ("image_token_id", "image_token_index", "video_token_id", "video_token_index"),
    "audio": ("audio_token_id", "audio_token_index"),
}
MEDIA = {"vision": ("pixel_values", "pixel_values_videos"), "audio": ("input_features",)}


class GradientAudit(TrainerCallback):  # type: ignore[misc]
    """Looks at every gradient just before the first optimizer step: accumulated, reduced and unscaled."""

    def __init__(self, run: "Run") -> None:
        self.run = run
        self.media: MediaWatch | None = None
        self.due = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.media is not None:  # an attempt that ran out of memory
            self.media.remove()
        self.media, self.due = None, True

    def on_step_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        if self.due:  # not before: a full-size step has other media
            self.media, self.due = MediaWatch(model), False

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        if self.media is None:
            return
        self.media.remove()
        gradients, media = gather(model, self.media, args.device)
        self.media = None
        section = self.run.facts["gradients"] = judge(gradients, media)
        for problem in section["problems"]:
            self.run.miss("strict", problem)


class MediaWatch:
    """Notes on the device whether a model's inputs hold image, video or audio tokens that are attended to.

    Only where a tower or a projector trains, for nothing else asks.
    """

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[str, torch.Tensor] = {}
        config = getattr(model, "config", None)
        self.ids = {kind: token_ids(config, names) for kind, names in TOKEN_IDS.items()}
        trainable = (plain_name(name) for name, p in model.named_parameters() if p.requires_grad)
        trains = any(component_of(name) != "text" for name in trainable)
        self.handle = model.register_forward_pre_hook(self._note, with_kwargs=True) if trains else None

    def _note(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids")
        if not module.training or not isinstance(ids, torch.Tensor):
            return
        attended = _attended(kwargs.get("attention_mask"), ids)
        for kind, tokens in self.ids.items():
            if any(kwargs.get(name) is not None for name in MEDIA[kind]):
                # A model whose config names no placeholder gets the benefit of the doubt: its medium counts.
                found = torch.stack([ids == token for token in tokens]).any(0) if tokens else attended
                seen = (found & attended).any()
                self.seen[kind] = self.seen[kind] | seen if kind in self.seen else seen

    def remove(self) -> None:
        if self.handle is not None:
            self.handle.remove()


def token_ids(config: Any, names: tuple[str, ...]) -> list[int]:
    """Return the placeholder ids a config names, that of an Omni model's thinker included."""
    configs = (config, getattr(config, "thinker_config", None))
    found = [getattr(part, name, None) for part in configs for name in names]
    return [token for token in found if isinstance(token, int)]


def _attended(mask: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return which tokens are attended to, (batch, length) bool, from a mask of padding or of pairs."""
    if not isinstance(mask, torch.Tensor):
        return torch.ones_like(ids, dtype=torch.bool)
    if mask.dim() == 4:  # (batch, 1, length, length): bool, or 0 where attended
        own = mask[:, 0].diagonal(dim1=-2, dim2=-1)
        return own if own.dtype == torch.bool else own == 0
    return mask.bool()


def gather(
    model: nn.Module, media: MediaWatch, device: torch.device
) -> tuple[list[Gradient], dict[str, bool]]:
    """Reduce every gradient to a number, those of all ranks by their maximum. Every rank must call this.

    A rank that holds no element of a tensor (FSDP's shards) says nothing about it.
    """
    parameters = {_name(name, p): p for name, p in model.named_parameters() if p.requires_grad}
    partners = {name: partner for name in parameters if (partner := partner_of(name)) in parameters}
    values = [_magnitude(p.grad) for p in parameters.values()]
    values += [_magnitude(parameters[partner].detach()) for partner in partners.values()]
    values += [media.seen[kind].float() if kind in media.seen else None for kind in TOKEN_IDS]
    keys = [*parameters, *((name, "partner") for name in partners), *TOKEN_IDS]
    levels = dict(zip(keys, _reduce(values, device), strict=True))
    gradients = [
        Gradient(name, levels[name] > 0, levels[name] > 1, partner_is_zero=levels.get((name, "partner")) == 1)
        for name in parameters
    ]
    return gradients, {kind: levels[kind] > 1 for kind in TOKEN_IDS}


def _name(name: str, parameter: nn.Parameter) -> str:
    """Return a plain name; FSDP1's flat parameter is named by the first of the tensors in it."""
    name = plain_name(name)
    inside = getattr(parameter, "_fqns", None)
    return name.replace("_flat_param", inside[0]) if inside else name


def _magnitude(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the largest absolute value of this rank's part, None where it has none."""
    local = getattr(tensor, "to_local", lambda: tensor)()
    if local is None or local.numel() == 0:
        return None
    largest: torch.Tensor = torch.linalg.vector_norm(local, ord=float("inf"))  # squares could underflow
    return largest.float()


def _reduce(values: list[torch.Tensor | None], device: torch.device) -> list[int]:
    """Return for each value 0 (no rank has one), 1 (zero on all) or 2 (not zero, or NaN, on some)."""
    if not values:
        return []
    nothing = torch.tensor(NO_TENSOR, device=device)
    stacked = torch.stack([nothing if value is None else value.to(device) for value in values])
    levels = (stacked != NO_TENSOR).int() + ((stacked != NO_TENSOR) & (stacked != 0)).int()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(levels, op=dist.ReduceOp.MAX)
    found: list[int] = levels.tolist()
    return found
