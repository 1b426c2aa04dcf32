"""What a full-size step that did not fit says: how much was missing where, and what might fit."""

import re
from dataclasses import dataclass

MULTIPLE = 8  # of tokens in a row, as the host pads
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
WANTED = re.compile(r"Tried to allocate ([\d.]+) (bytes|[KMG]iB)")
ESTIMATE = "`llamafactory-ascend estimate RECIPE` compares recipes without a card"


def wanted(message: str) -> int:
    """Return the bytes that could not be allocated, by torch's message; 0 where it does not say."""
    found = WANTED.search(message)
    return int(float(found[1]) * UNITS[found[2]]) if found else 0


@dataclass(frozen=True)
class Shortage:
    """A full-size step that ran out of memory; all sizes in bytes.

    Attributes:
        phase: of the run, as in the report.
        wanted: by the allocation that failed.
        allocated, peak: when it failed, and the most until then in this step.
        before: allocated before the step.
        total: of the device, 0 if it is not known.
        rows, cutoff_len: of a micro-batch.
        checkpointed: every layer in backward is.
    """

    rank: int
    phase: str
    wanted: int
    allocated: int
    peak: int
    before: int
    total: int
    rows: int
    cutoff_len: int
    checkpointed: bool

    def what(self) -> str:
        """Say what happened."""
        total = f" of {self.total:,} on the device" if self.total else ""
        return (
            f"rank {self.rank}: out of memory in {self.phase} of the full-size step (`ascend.stress`), which "
            f"is {self.rows} x {self.cutoff_len:,} tokens a micro-batch: {self.wanted:,} bytes wanted, "
            f"{self.allocated:,} allocated{total} (peak {self.peak:,}, {self.before:,} before the step)"
        )

    def fitting(self) -> int:
        """Return how long rows might be, if all that the step adds grows with them; 0: nothing can be said.

        A guess from the peak and what was wanted then: what comes behind the point of failure is not known.
        """
        need = self.peak + self.wanted - self.before
        if need <= 0 or self.total <= self.before:
            return 0
        tokens = self.cutoff_len * (self.total - self.before) // need
        return tokens // MULTIPLE * MULTIPLE

    def hint(self) -> str:
        """Say what to type next."""
        if self.phase == "optimizer":
            return (
                "no shorter row helps here: gradients and optimizer state do not fit; `fsdp: full_shard "
                f"auto_wrap` over more cards, or `finetuning_type: lora`; {ESTIMATE}"
            )
        key = "per_device_eval_batch_size" if self.phase == "evaluation" else "per_device_train_batch_size"
        options = [f"lower `cutoff_len`{self.guess()}"]
        if self.rows > 1:
            options.append(f"`{key}: {self.rows // 2}`")
        if not self.checkpointed and self.phase != "evaluation":
            options.append("`ascend: {checkpointing: full}`")
        return f"{', or '.join([*options, '`fsdp: full_shard auto_wrap` over more cards'])}; {ESTIMATE}"

    def guess(self) -> str:
        fitting = self.fitting()
        if not fitting or fitting >= self.cutoff_len:
            return ""
        return (
            f" (a guess: {fitting:,}, if all beyond the {self.before:,} bytes of before the step grows with "
            "it and nothing larger follows)"
        )
