"""Says for checkpoints what the models' packages know of Hugging Face folders."""

import torch

from checkpoint.hub_import import HubNames
from models.config import ModelConfig
from models.registry import family_of, hub_format


def hub_names(config: ModelConfig) -> HubNames:
    """Where Hugging Face files keep the parameters of a model.

    Args:
        config: Its config.

    Raises:
        ValueError: If they do not hold such models.
    """
    family, hub = family_of(config), hub_format(config)
    with torch.device("meta"):
        model = family.build(config)
    fqns = [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)]
    return HubNames(
        places=lambda names: {fqn: hub.parts(config, fqn, names) for fqn in fqns},
        ignored=hub.ignored,
        tied=family.plan(config).tied,
    )
