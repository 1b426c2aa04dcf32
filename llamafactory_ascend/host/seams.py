"""Which host modules are watched, and what happens when one is ready. Light: loaded at ``import torch``."""

import functools

MODULES = (
    "llamafactory.launcher",
    "llamafactory.extras.arguments",
    "llamafactory.hparams.parser",
    "llamafactory.model.loader",
    "llamafactory.model.model_utils.checkpointing",
    "transformers.trainer",
    "accelerate.utils.fsdp_utils",
)


def module_ready(module: str) -> None:
    """Apply the patches of a host module that is completely imported."""
    ledger().module_ready(module)


@functools.cache
def ledger():  # type: ignore[no-untyped-def]  # the type would import half the plugin at `import torch`
    """Return the ledger of this process with the patches of every plugin in it, watching their modules."""
    from llamafactory_ascend import _autoload, log, plugins, run

    ledger = run.current().ledger
    for patches in plugins.manager().hook.ascend_patches():
        for patch in patches:
            ledger.add(patch)
    for target in (target for record in ledger.records.values() for target in record.patch.targets):
        if target.module not in MODULES:
            _autoload.watcher().watch(target.module, ledger.module_ready)
    log.info(f"active: {len(ledger.records)} patches planned")
    return ledger
