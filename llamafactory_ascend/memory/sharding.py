"""What the ranks of a training share out: nothing, gradients (DDP), or the weights as well (FSDP2)."""

from typing import Any

from torch import nn

from llamafactory_ascend.memory.ledger import COLLECTIVES, Hold, Ledger, block


class Sharding:
    """One rank alone: every weight is whole on its card."""

    def __init__(self, model: nn.Module, ledger: Ledger, cards: int) -> None:
        self.model, self.ledger, self.cards = model, ledger, cards

    def load(self) -> None:
        """Charge what lies on a card when the training begins."""
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            self.ledger.charge(tensor)

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that this rank's optimizer updates."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def cast(self, value: Any) -> Any:
        """Return an input of the model in the dtype that the model takes."""
        return value

    def enter_model(self) -> None:
        """The model's forward begins."""

    def leave_model(self) -> None:
        """The model's forward has ended."""

    def enter_forward(self, layer: nn.Module) -> None:
        """A layer's forward begins."""

    def leave_forward(self, layer: nn.Module) -> None:
        """A layer's forward has ended."""

    def begin_backward(self) -> None:
        """Backward begins."""

    def enter_backward(self, layer: nn.Module) -> None:
        """A layer's backward begins; it is recomputed first where it is checkpointed."""

    def leave_backward(self, layer: nn.Module, inputs: bool) -> bool:
        """A layer's backward has ended.

        Args:
            inputs: its inputs have gradients.

        Returns:
            The gradients of the layer's weights have been taken.
        """
        return False

    def end_backward(self) -> None:
        """All of backward has ended."""

    def give_gradients(self) -> None:
        """Hand the gradients of `trained` to the optimizer."""

    def save(self) -> None:
        """Gather what is written."""


BROADCAST = 250 << 20  # bytes that DDP sends at once when it makes all ranks equal


class Replicas(Sharding):
    """DDP: every card has all weights, and buckets of all gradients."""

    def load(self) -> None:
        super().load()
        sizes = [tensor.nbytes for tensor in (*self.model.parameters(), *self.model.buffers())]
        trained = sum(parameter.nbytes for parameter in self.trained())
        self._buckets = Hold(self.ledger, block(COLLECTIVES, trained))
        self.ledger.spike(block(COLLECTIVES, min(BROADCAST, sum(sizes))))
