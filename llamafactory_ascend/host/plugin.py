"""The host's side as a plugin: all patches of this package."""

from llamafactory_ascend.hookspecs import hookimpl
from llamafactory_ascend.patching import Patch


@hookimpl
def ascend_patches() -> list[Patch]:
    from llamafactory_ascend.host import arguments, checkpointing, launching, model, trainer

    modules = (launching, arguments, model, checkpointing, trainer)
    return [patch for module in modules for patch in module.PATCHES]
