"""Lengths of whole data sets in tokens: counters of a fixed size that batches are added up in."""
