"""Holds what tutorials say of a GPU's memory against the planner."""

from collections.abc import Iterator

from parallel.plan import ModelShape
from parallel.planner.accounting import state_bytes
from parallel.planner.candidate import Request
from parallel.planner.claim import GPU, SHARES, Claim, Shapes
from parallel.planner.hardware import find_gpu
from parallel.planner.search import search

GB = 1e9


def of_states(num_parameters: float = 7e9) -> Iterator[Claim]:
    """What a GPU holds of a model's states.

    Args:
        num_parameters: Of the model.
    """
    ranks = (1, 8, 32, 64)
    full = [state_bytes("classic", "full_shard", num_parameters, each) / GB for each in ranks]
    half = [num_parameters * 8 / each / GB for each in ranks]
    yield Claim(
        "7B at 1/8/32/64 ranks holds 112/14/3.5/1.75 GB of states a GPU",
        f"{_listed(full)} GB: 16 bytes a parameter over N under full_shard",
        _are(full, (112.0, 14.0, 3.5, 1.75)),
        "parameters, gradients, float32 copy and both moments are counted: 2+2+4+4+4 in float16 training, or 4+4+8 as "
        "stored here",
    )
    yield Claim(
        "7B at 1/8/32/64 ranks holds 56/7/1.75/0.88 GB of states a GPU",
        f"{_listed(half)} GB is 8 bytes a parameter over N; AdamW's states are {_listed(full)} GB",
        _are(full, (56.0, 7.0, 1.75, 0.88)),
        "8 bytes a parameter: AdamW's moments alone (4+4), or pure bfloat16 training without a float32 copy (2+2+2+2)",
    )


def of_stages(ranks: tuple[int, ...] = (2, 8, 64)) -> Claim:
    """What ZeRO's stages save: said are two figures whatever the ranks, of two stages in their order.

    Args:
        ranks: Numbers of GPUs.
    """
    names = ("zero1", "shard_grad_op", "full_shard")
    saved = {name: [1 - state_bytes("classic", name, 1, each) / 16 for each in ranks] for name in names}
    words = {"zero1": "ZeRO-1", "shard_grad_op": "ZeRO-2", "full_shard": "ZeRO-3"}
    figures = "; ".join(f"{words[each]} {' / '.join(f'{part:.0%}' for part in saved[each])}" for each in names)
    save = [{each for each in names if all(abs(part - said) < SHARES for part in saved[each])} for said in (0.5, 0.66)]
    return Claim(
        "ZeRO's stages save 50 % and 66 % of memory",
        f"of states on {' / '.join(map(str, ranks))} ranks: {figures}",
        any(names.index(less) < names.index(more) for less in save[0] for more in save[1]),
        "50 % is ZeRO-3 on 2 ranks (ZeRO-2 on 2.3, ZeRO-1 on 3), 66 % ZeRO-3 on 3 or ZeRO-1 on 8; shares depend on N, "
        "and activations are not shared at all",
    )


def of_fits(shape_of: Shapes) -> Iterator[Claim]:
    """How many GPUs a model fits.

    Args:
        shape_of: Gives llama3.1-70b and gpt-175b.
    """
    for name, said, ranks, shape in (("70B", 70e9, 8, "llama3.1-70b"), ("175B", 175e9, 32, "gpt-175b")):
        held = state_bytes("classic", "full_shard", said, ranks) / GB
        fewest, offloaded = (_fewest(shape_of(shape), offloads) for offloads in (False, True))
        yield Claim(
            f"{name} trains on {ranks} x 80 GB",
            f"16P/N is {held:g} GB a GPU; the fewest {GPU} that hold it are {fewest}"
            + (f", or {offloaded} with states in host memory" if offloaded != fewest else ""),
            fewest <= ranks,
            "optimizer states are in host memory, or adapters are trained, or the bfloat16 weights alone are counted "
            f"({2 * said / ranks / GB:.1f} GB a GPU)",
        )


def _fewest(shape: ModelShape, offloads: bool) -> int:
    """The fewest GPUs, in whole nodes, that a model fits."""
    nodes = 1
    while True:
        request = Request(
            shape=shape, gpu=find_gpu(GPU), num_gpus=8 * nodes, sequence_length=2048, global_batch=8 * nodes
        )
        if search(request, most=1, allows=lambda _, kind: offloads or not kind.offloads).plans:
            return 8 * nodes
        nodes += 1


def _are(values: list[float], said: tuple[float, ...]) -> bool:
    return all(abs(ours - theirs) < 0.01 for ours, theirs in zip(values, said, strict=True))


def _listed(values: list[float]) -> str:
    return "/".join(f"{each:.3g}" for each in values)
