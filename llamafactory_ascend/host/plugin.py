"""The host's side as a plugin: all patches of this package, and the kernel it brings."""

from llamafactory_ascend.hookspecs import hookimpl
from llamafactory_ascend.kernels.backends import Backend
from llamafactory_ascend.patching import Patch


@hookimpl
def ascend_patches() -> list[Patch]:
    from llamafactory_ascend.host import (
        adapters,
        arguments,
        checkpointing,
        collator,
        data,
        evaluation,
        kernels,
        launching,
        loss,
        model,
        platform,
        sharded_weights,
        sharding,
        targets,
        tokenized,
        trained_lengths,
        trainer,
    )

    early = (launching, arguments, adapters, model, kernels, checkpointing)
    late = (
        collator,
        data,
        evaluation,
        loss,
        platform,
        sharded_weights,
        sharding,
        targets,
        tokenized,
        trained_lengths,
        trainer,
    )
    return [patch for module in (*early, *late) for patch in module.PATCHES]


@hookimpl
def ascend_kernels() -> list[Backend]:
    from llamafactory_ascend.host import kernels

    return list(kernels.BACKENDS)
