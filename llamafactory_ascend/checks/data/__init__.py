"""Data sets before the first step: dataset_info.json, files, encodings, rows, roles, media, lengths. Pure."""
