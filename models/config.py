"""What every model's config offers, so that recipes need not know which model it is."""

from abc import abstractmethod
from dataclasses import dataclass

from parallel.plan import ModelShape


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Base of the configs of all model families."""

    @property
    @abstractmethod
    def shape(self) -> ModelShape:
        """Counts and widths, from which `parallel` computes."""

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Parameters of the model, tied ones once."""
