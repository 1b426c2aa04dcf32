"""Pure functions over files and configurations; nothing here needs a model, a device or the host."""
