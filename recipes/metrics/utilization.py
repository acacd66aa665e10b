"""MFU: the share of what the devices could compute that a run puts into its model."""

import re
from dataclasses import dataclass

import torch

from parallel.config import ParallelConfig
from parallel.ledger.flops import FlopConvention, training_flops_per_token, utilization
from parallel.plan import ModelShape
from recipes.metrics.config import MetricsConfig

BFLOAT16_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.4,
    "GH200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "MI300X": 1307.4,
}
"""Dense peak of known GPUs by words of their names, as their data sheets give it; the first that fits counts."""


@dataclass(frozen=True, kw_only=True)
class Utilization:
    """What MFU of a run is computed from.

    Attributes:
        convention: What counts as FLOPs.
        flops_per_token: By that convention.
        peak_flops_per_s: Peak of one device.
        num_devices: Devices that train.
    """

    convention: FlopConvention
    flops_per_token: int
    peak_flops_per_s: float
    num_devices: int

    def of(self, num_tokens: int, step_time_s: float) -> float:
        """MFU of a step.

        Args:
            num_tokens: Tokens that the model saw, over all ranks; those that do not enter the loss count, padding
                rows do not.
            step_time_s: Wall time.
        """
        rate = num_tokens / step_time_s if step_time_s > 0 else 0.0
        return utilization(self.flops_per_token, rate, self.peak_flops_per_s, self.num_devices)

    def describe(self) -> str:
        """How it is counted, in a few words."""
        return (
            f"MFU of {self.peak_flops_per_s / 1e12:g} TFLOP/s a device, by {self.convention}: "
            f"{self.flops_per_token / 1e9:.3g} GFLOPs a token"
        )


def find_utilization(
    config: MetricsConfig,
    shape: ModelShape,
    layout: ParallelConfig,
    *,
    sequence_length: int,
    device: torch.device,
    num_devices: int,
) -> Utilization | None:
    """What MFU is computed from, None where the peak of the device is neither configured nor known.

    Args:
        config: Convention and peak.
        shape: The model's counts and widths.
        layout: Tells the compute dtype.
        sequence_length: Tokens of a sequence.
        device: This rank's device.
        num_devices: Devices that train.
    """
    tflops = config.peak_tflops
    if tflops is None and device.type == "cuda" and layout.precision.compute == "bfloat16":
        tflops = known_bfloat16_tflops(torch.cuda.get_device_name(device))
    if tflops is None:
        return None
    return Utilization(
        convention=config.flops,
        flops_per_token=training_flops_per_token(shape, sequence_length, config.flops),
        peak_flops_per_s=tflops * 1e12,
        num_devices=num_devices,
    )


def known_bfloat16_tflops(device_name: str) -> float | None:
    """Peak of a GPU in bfloat16, in TFLOP/s; None if it is not known.

    Args:
        device_name: As the driver gives it.
    """
    words = set(re.findall(r"\w+", device_name))
    return next((peak for name, peak in BFLOAT16_TFLOPS.items() if set(name.split()) <= words), None)
