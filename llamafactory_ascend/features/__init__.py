"""What the plugin does for a run, one file per feature. Nothing here knows the host's modules."""
