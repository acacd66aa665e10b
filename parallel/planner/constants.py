"""The few numbers that the planner takes from measurement rather than from a formula or a data sheet."""

from typing import NamedTuple


class Constants(NamedTuple):
    """What was fitted on published results, and what was taken from elsewhere.

    Attributes:
        matmul_share: Share of a chip's peak that large matmuls reach where power does not limit them; fitted.
        tflops_per_w: What a chip computes per watt, in TFLOP/s, which limits those that have little power for their
            peak; fitted, and the same for all chips.
        eager_passes: How much more memory the small operations move that are not compiled into one; fitted.
        link_share: Share of a link's bandwidth that collectives reach; fitted.
        attention_share: Speed of fused attention relative to that of matmuls; assumed, from hand fits of single rows,
            which gave 0.75 to 0.8 on each chip.
        memory_share: Share of the memory's bandwidth that small operations reach; assumed.
        overlap: Share of a computation behind which a collective can hide; the rest is its start and end; assumed.
        interference: Share of a hidden collective that computation is slowed by, as both use memory and cores; assumed.
        ring_share: Speed of attention to one rank's keys at a time relative to attention to all at once, whose kernel
            starts once and has more rows to share out; assumed.
        grouped_share: Speed of experts' matmuls, of which each has some of the tokens, relative to dense ones; assumed.
        kernel_s: Time that an operation takes at least, however small, in seconds: its launch, of which profilers show
            some microseconds; assumed.
        reserved_share: What the caching allocator reserves over what is allocated; fitted on published memory.
    """

    matmul_share: float = 0.69
    tflops_per_w: float = 0.925
    eager_passes: float = 2.6
    link_share: float = 0.5
    attention_share: float = 0.8
    memory_share: float = 0.8
    overlap: float = 0.9
    interference: float = 0.1
    ring_share: float = 0.75
    grouped_share: float = 0.7
    kernel_s: float = 5e-6
    reserved_share: float = 0.21

    def achieved_flops(self, peak_tflops: float, power_w: float) -> float:
        """FLOP/s that large matmuls reach on a chip; one function for all.

        Args:
            peak_tflops: Its dense peak.
            power_w: Its limit of power.
        """
        return 1e12 * min(self.matmul_share * peak_tflops, self.tflops_per_w * power_w)


FITTED = ("matmul_share", "tflops_per_w", "eager_passes", "link_share", "reserved_share")
"""The constants that published rows determine."""

CONSTANTS = Constants()
