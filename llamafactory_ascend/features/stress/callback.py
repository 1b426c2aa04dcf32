"""The full-size step: one optimizer step and one evaluation step through the Trainer, then all as before."""

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import TrainerCallback

from llamafactory_ascend import device, log
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features.checkpointing import OURS
from llamafactory_ascend.features.stress import full_rows, snapshot
from llamafactory_ascend.features.stress.refusal import Shortage, wanted
from llamafactory_ascend.launching import signals
from llamafactory_ascend.report import failure
from llamafactory_ascend.report.document import PEER_GONE

if TYPE_CHECKING:
    from transformers import Trainer

    from llamafactory_ascend.run import Run

Bytes = dict[str, int] | None  # as ``device.memory`` returns them


class Stress(TrainerCallback):  # type: ignore[misc]
    """Takes the step when everything else is ready for the first; no callback hears of it."""

    def __init__(self, run: "Run", trainer: "Trainer", cutoff_len: int) -> None:
        self.run, self.trainer, self.cutoff_len = run, trainer, cutoff_len
        self.rows = 0  # of the batch that is being computed

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:
            self.run.decide("stress", "not run", f"all {state.max_steps} steps are done")
            return
        signals.requests.listen()  # there is nothing to save yet, so that one stops at once
        section = self.run.facts["stress"] = self.rehearse(args)
        signals.requests.hold()
        peak = section["peak_allocated"]
        size = f", peak {peak:,} bytes allocated on rank 0" if peak else ""
        log.info(f"stress: a full-size step of {section['tokens']:,} tokens fits{size}")

    def rehearse(self, args: Any) -> dict[str, Any]:
        """Take the step and undo it.

        Returns:
            `seconds`; `phase`, the last one that was passed: optimizer or evaluation; `cutoff_len`; `rows` of
            a micro-batch, `micro_batches`, `tokens` of them all, padding included, of which `media_tokens`
            stand for pictures, videos and sounds; `peak_allocated` and `peak_reserved` of the optimizer step;
            `evaluation`: null, or its `rows`, `tokens`, `media_tokens` and peaks; `allocated_before` the step
            and `peak_before` it, since the process began. All sizes in bytes, null on a CPU.

        Raises:
            AscendError: it does not fit, or cannot be done.
        """
        kind, trainer = args.device.type, snapshot.stand_in(self.trainer)
        began, before = time.monotonic(), device.memory(kind)
        device.forget_peaks(kind)
        try:
            with snapshot.random_states(args.device):
                section = self.step(trainer, args)
        except Exception as error:
            raise self.refusal(error, args, before) from error
        from accelerate.utils.memory import clear_device_cache

        clear_device_cache(garbage_collection=True)
        device.forget_peaks(kind)
        return {
            "seconds": round(time.monotonic() - began, 1),
            **section,
            "allocated_before": before and before["allocated"],
            "peak_before": before and before["peak_allocated"],
        }

    def step(self, trainer: Any, args: Any) -> dict[str, Any]:
        """Train and evaluate full-size batches; weights, optimizer and scaler come out as they went in."""
        model, count = trainer.model_wrapped, args.gradient_accumulation_steps
        weights = snapshot.keep_weights(model)
        optimizer = snapshot.keep_optimizer(trainer.optimizer)
        batches = self.batches(trainer, trainer.train_dataset, args.train_batch_size, count)
        section = {"phase": "optimizer", "cutoff_len": self.cutoff_len, "micro_batches": count}
        section |= self.size(trainer, batches)
        allocate(trainer.optimizer)
        with snapshot.loss_scale(trainer.accelerator.scaler):
            optimize(trainer, model, batches)
        del batches
        section |= _peaks(args.device)
        weights()  # before the evaluation: FSDP may keep what it gathers for it
        if self.evaluates(args):
            batches = self.batches(trainer, self.evaluation_set(trainer), args.eval_batch_size, 1)
            evaluation = self.size(trainer, batches)
            evaluate(trainer, batches[0])
            section |= {"phase": "evaluation", "evaluation": {**evaluation, **_peaks(args.device)}}
        optimizer()
        model.zero_grad()
        return {"evaluation": None, **section}

    def size(self, trainer: Any, batches: list[Any]) -> dict[str, int]:
        media = self.media(trainer)
        return {
            "rows": int(batches[0]["labels"].shape[0]),
            "tokens": full_rows.count_tokens(batches),
            "media_tokens": sum(full_rows.count_media(batch, media) for batch in batches),
        }

    def media(self, trainer: Any) -> list[int]:
        return full_rows.media_ids(getattr(trainer.accelerator.unwrap_model(trainer.model), "config", None))

    def batches(self, trainer: Any, data: Any, rows: int, count: int) -> list[Any]:
        """Return full-size batches on the device, as the Trainer's loader would."""
        from accelerate.utils import send_to_device

        pad = getattr(trainer.processing_class, "pad_token_id", None) or 0
        if trainer.args.world_size == 1:  # several ranks repeat rows until each has a whole batch
            rows = min(rows, len(data))
        self.rows = rows
        found = full_rows.fullest(data, rows, self.media(trainer))
        batches = []
        for _ in range(count):  # anew, because collators and losses take things out of what they are given
            full = [full_rows.lengthen(row, self.cutoff_len, pad) for row in found]
            batches.append(send_to_device(trainer.data_collator(full), trainer.args.device))
        return batches

    def evaluates(self, args: Any) -> bool:
        if not args.do_eval or not self.trainer.eval_dataset:
            return False
        if getattr(args, "predict_with_generate", False):
            reason = "`predict_with_generate` generates for as long as the model goes on"
            self.run.decide("stress.evaluation", "not run", reason)
            return False
        return True

    def evaluation_set(self, trainer: Any) -> Any:
        """Return the evaluation data set, of several the one with the fullest row, and enough of them."""
        found, media = trainer.eval_dataset, self.media(trainer)
        if not isinstance(found, dict):
            return found

        def fullness(rows: Any) -> tuple[int, int]:
            fullest = full_rows.fullest(rows, 1, media)[0]
            return full_rows.count_media(fullest, media), min(len(rows), trainer.args.eval_batch_size)

        return max((rows for rows in found.values() if len(rows)), key=fullness)

    def refusal(self, error: Exception, args: Any, before: Bytes) -> AscendError:
        """Say what did not fit, and what might."""
        step = self.trainer.state.global_step
        found = failure.describe(error, log.rank(), step, args.device.type)
        phase = found["phase"]
        if not found["out_of_memory"]:
            said = f"{found['type']}: {found['headline']} at {found['where']}"
            what = f"the full-size step of `ascend.stress` failed on rank {log.rank()} in {phase}: {said}"
            if PEER_GONE.search(said):
                return AscendError(what, "another rank has gone: see what it says")
            return AscendError(what, "LLAMAFACTORY_ASCEND_TRACE=1 shows the traceback")
        memory = found["memory"] or {}
        decision = self.run.decisions.get("checkpointing")
        shortage = Shortage(
            rank=log.rank(),
            phase=phase,
            wanted=wanted(found["headline"]),
            allocated=memory.get("allocated", 0),
            peak=memory.get("peak_allocated", 0),
            before=(before or {}).get("allocated", 0),
            total=device.decide(args.device.type).memory or 0,
            rows=self.rows,
            cutoff_len=self.cutoff_len,
            checkpointed=decision is not None and decision.choice.startswith(OURS),
        )
        return AscendError(shortage.what(), shortage.hint())


@torch.no_grad()
def allocate(optimizer: Any) -> None:
    """Let an optimizer make its state, which lies beside the activations in every step but the first."""
    if optimizer.state:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    getattr(optimizer, "optimizer", optimizer).step()  # past Accelerate, which waits for a scaled loss
    for parameter in parameters:
        parameter.grad = None


def optimize(trainer: Any, model: nn.Module, batches: list[Any]) -> None:
    """Take an optimizer step as the Trainer's loop does, without its events, its log and its scheduler."""
    accelerator, args = trainer.accelerator, trainer.args
    samples, items = trainer.get_batch_samples(iter(batches), len(batches), args.device)
    trainer.current_gradient_accumulation_steps = len(samples)
    each = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
    for place, inputs in enumerate(samples, 1):
        last = place == len(samples)
        accelerator.sync_gradients = last
        with nullcontext() if last or each else accelerator.no_sync(model):
            trainer.training_step(model, inputs, items)
    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or float("inf"))
    trainer.optimizer.step()
    model.zero_grad()


def evaluate(trainer: Any, batch: Any) -> None:
    """Take one step of an evaluation."""
    trainer.model.eval()
    loss_only = trainer.compute_metrics is None or trainer.args.prediction_loss_only
    trainer.prediction_step(trainer.model, batch, prediction_loss_only=loss_only)


def _peaks(where: torch.device) -> dict[str, int | None]:
    """Return the peaks since they were last forgotten, and forget them."""
    torch.get_device_module(where).synchronize()
    found = device.memory(where.type) or {}
    device.forget_peaks(where.type)
    return {name: found.get(name) for name in ("peak_allocated", "peak_reserved")}
