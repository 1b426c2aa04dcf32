"""What a training step holds on a card, measured on a model without weights."""
