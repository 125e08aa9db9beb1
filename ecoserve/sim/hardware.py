"""GPUs, what joins them, and how much of their rated speed kernels reach.

Rates come from the vendors' data sheets (dense BF16, decimal units). Efficiencies are either fitted
to measured kernels or carried over from the nearest GPU that was; ``Gpu.source`` says which, and
docs/cost-model.md what was fitted on what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Link:
    """Something that carries bytes: ``latency`` seconds, ``rate`` bytes/s, the share of it used."""

    latency: float
    rate: float
    utilisation: float = 1.0

    def seconds(self, size: float) -> float:
        """Time for ``size`` bytes that have the link to themselves."""
        return self.latency + size / (self.rate * self.utilisation)


@dataclass(frozen=True, slots=True)
class Gemm:
    """Efficiency of matrix products: ramp + ((flop / compute)^p + (bytes / memory)^p)^(1/p).

    ``compute`` and ``memory`` are shares of the rated speeds that large products reach,
    ``sharpness`` is p, ``ramp`` the seconds that any kernel takes to start and end. A matrix split
    over more devices loses efficiency through the ramp alone.
    """

    compute: float
    memory: float
    sharpness: float
    ramp: float


@dataclass(frozen=True, slots=True)
class Attention:
    """Efficiency of attention kernels.

    A prompt of n tokens reaches ``prefill`` / (1 + ``half`` / n) of the rated flop/s, so half of
    the best at n = ``half``; decode reads KV at ``decode`` of the rated bandwidth.
    """

    prefill: float = 0.70
    half: float = 1000.0
    decode: float = 0.75


@dataclass(frozen=True, slots=True)
class AllReduce:
    """latency + 2 (TP-1)/TP bytes / bus, by TP: NCCL's bus bandwidth, bytes/s.

    A TP between two of the table takes the figures of the next larger one.
    """

    latency: Mapping[int, float]
    bus: Mapping[int, float]

    def seconds(self, size: float, tp: int) -> float:
        """Time to sum ``size`` bytes over ``tp`` devices; ValueError for more than the table's."""
        if tp == 1:
            return 0.0
        key = min((known for known in self.bus if known >= tp), default=0)
        if not key:
            raise ValueError(f"tp: all-reduce is known up to {max(self.bus)} devices, not {tp}")
        return self.latency[key] + 2 * (tp - 1) / tp * size / self.bus[key]


def _all_reduce(**by_tp: tuple[float, float]) -> AllReduce:
    """From tp2=(microseconds, GB/s), ..."""
    table = {int(key[2:]): value for key, value in by_tp.items()}
    return AllReduce(
        MappingProxyType({tp: 1e-6 * us for tp, (us, _) in table.items()}),
        MappingProxyType({tp: 1e9 * rate for tp, (_, rate) in table.items()}),
    )


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as it stands in a node.

    ``flops`` dense BF16 flop/s, ``bandwidth`` bytes/s and ``memory`` bytes of device memory;
    ``peer`` joins two GPUs of a node, ``host`` a GPU and host memory (KV that moves inside a
    node without a faster way crosses it), ``nic`` the node and the network (one for all its GPUs).
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    all_reduce: AllReduce
    peer: Link
    host: Link
    nic: Link
    gemm: Gemm
    attention: Attention = field(default_factory=Attention)
    streaming: float = 0.85
    """Share of the bandwidth that elementwise kernels reach."""
    gpus: int = 8
    """GPUs in a node."""
    price: float = 1.0
    """Indicative US dollars an hour. An ASSUMPTION: the order of magnitude of on-demand list prices
    that GPU clouds published in 2025, from no one vendor. Only ratios between systems on the same
    GPU are meant; give your own price for anything else."""
    source: str = "extrapolated"
    """"fitted" if ``gemm`` was fitted to this GPU's measured kernels; else what it stems from."""


_A100 = Gemm(compute=0.745, memory=0.822, sharpness=1.41, ramp=5.1e-6)
_A40 = Gemm(compute=0.777, memory=0.782, sharpness=1.64, ramp=3.6e-6)
_H100 = Gemm(compute=0.733, memory=0.982, sharpness=1.46, ramp=6.9e-6)
_L20 = Gemm(compute=0.70, memory=0.782, sharpness=1.64, ramp=3.6e-6)

_PCIE4 = Link(10e-6, 32e9, 0.75)
_PCIE5 = Link(10e-6, 64e9, 0.75)
_NVLINK_A800 = Link(5e-6, 200e9, 0.8)
_NVLINK_A100 = Link(5e-6, 300e9, 0.8)
_NVLINK_H100 = Link(5e-6, 450e9, 0.8)
# TCP reaches nine tenths of a slow line (assumed); RDMA as Mooncake published it (0.71-0.82).
_TCP_10G = Link(1e-3, 1.25e9, 0.9)
_ROCE_25G = Link(0.3e-3, 3.125e9, 0.77)
_ROCE_100G = Link(0.3e-3, 12.5e9, 0.77)
_IB_400G = Link(0.3e-3, 50e9, 0.77)

# The bus bandwidth between L20s is not published. 10 GB/s is inferred from published prefill rates
# (they imply 7-13), and is the figure to sweep: results depend on it more than on any other.
_L20_BUS = _all_reduce(tp2=(15, 10), tp4=(15, 10), tp8=(20, 10))
_L40S_BUS = _all_reduce(tp2=(15, 20), tp4=(20, 5.1), tp8=(26, 1.5))
_A800_PCIE_BUS = _all_reduce(tp2=(15, 20), tp4=(20, 20), tp8=(25, 20))
_A100_BUS = _all_reduce(tp2=(12, 180), tp4=(15, 180), tp8=(20, 175))
_A800_BUS = _all_reduce(tp2=(12, 120), tp4=(15, 120), tp8=(20, 117))
_H100_BUS = _all_reduce(tp2=(10, 320), tp4=(12, 340), tp8=(15, 350))

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="L20", flops=119.5e12, bandwidth=864e9, memory=48e9,
            all_reduce=_L20_BUS, peer=_PCIE4, host=_PCIE4, nic=_TCP_10G,
            gemm=_L20, price=0.60, source="extrapolated from A40",
        ),
        Gpu(
            name="L40S", flops=362e12, bandwidth=864e9, memory=48e9,
            all_reduce=_L40S_BUS, peer=_PCIE4, host=_PCIE4, nic=_ROCE_25G,
            gemm=_L20, price=1.00, source="extrapolated from A40",
        ),
        Gpu(
            name="A40", flops=149.7e12, bandwidth=696e9, memory=48e9,
            all_reduce=_L20_BUS, peer=_PCIE4, host=_PCIE4, nic=_ROCE_25G,
            gemm=_A40, price=0.50, source="fitted",
        ),
        Gpu(
            name="A800-PCIe", flops=312e12, bandwidth=1.935e12, memory=80e9,
            all_reduce=_A800_PCIE_BUS, peer=_PCIE4, host=_PCIE4, nic=_ROCE_25G,
            gemm=_A100, price=1.40, source="extrapolated from A100",
        ),
        Gpu(
            name="A800-SXM", flops=312e12, bandwidth=2.039e12, memory=80e9,
            all_reduce=_A800_BUS, peer=_NVLINK_A800, host=_PCIE4, nic=_ROCE_100G,
            gemm=_A100, price=1.60, source="extrapolated from A100",
        ),
        Gpu(
            name="A100", flops=312e12, bandwidth=2.039e12, memory=80e9,
            all_reduce=_A100_BUS, peer=_NVLINK_A100, host=_PCIE4, nic=_ROCE_100G,
            gemm=_A100, price=1.60, source="fitted",
        ),
        Gpu(
            name="H100", flops=989e12, bandwidth=3.35e12, memory=80e9,
            all_reduce=_H100_BUS, peer=_NVLINK_H100, host=_PCIE5, nic=_IB_400G,
            gemm=_H100, price=2.60, source="fitted",
        ),
        Gpu(
            name="H200", flops=989e12, bandwidth=4.8e12, memory=141e9,
            all_reduce=_H100_BUS, peer=_NVLINK_H100, host=_PCIE5, nic=_IB_400G,
            gemm=_H100, price=3.40, source="extrapolated from H100",
        ),
    )
}  # fmt: skip


def gpu(name: str) -> Gpu:
    """The GPU of that name, in any case; a ValueError lists the names otherwise."""
    for known, found in GPUS.items():
        if known.lower() == name.lower():
            return found
    raise ValueError(f"gpu: {name!r} is not known; known are {', '.join(GPUS)}")
