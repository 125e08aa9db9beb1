"""GPUs, what joins them, and how much of their rated speed kernels reach.

Rates come from the vendors' data sheets (dense BF16, decimal units). Efficiencies are either fitted
to measured kernels or carried over from the nearest GPU that was; ``Gpu.source`` says which, and
docs/cost-model.md what was fitted on what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    """Efficiency of matrix products (``kernels.product`` is the form).

    ``compute`` and ``memory`` are shares of the rated speeds, the first for an endless tile;
    ``sharpness`` is the p of the roofline; ``ramp`` the seconds that any kernel takes to start and
    end, through which a matrix split over more devices loses efficiency; ``edge`` (elements) what
    small tiles lose, ``wave`` the share of an unfilled last wave that is lost.
    """

    compute: float
    memory: float
    sharpness: float
    ramp: float
    edge: float
    wave: float


@dataclass(frozen=True, slots=True)
class Attention:
    """Efficiency of attention kernels.

    A prompt of n tokens reaches ``prefill`` / (1 + ``half`` / n) of the rated flop/s, so half of
    the best at n = ``half``; decode reads KV at ``decode`` of the rated bandwidth, ``pad`` tokens
    more for each sequence than it has.
    """

    prefill: float
    half: float
    decode: float
    pad: float


@dataclass(frozen=True, slots=True)
class AllReduce:
    """(latency^p + (2 (TP-1)/TP bytes / bus)^p)^(1/p), by TP: seconds, bytes/s, p.

    ``bus`` is the bus bandwidth as NCCL's tests define it. At p = 1 latency simply adds; below,
    messages of middling size take longer than that. A TP between two of the table takes the figures
    of the next larger one.
    """

    latency: Mapping[int, float]
    bus: Mapping[int, float]
    sharpness: Mapping[int, float]

    def seconds(self, size: float, tp: int) -> float:
        """Time to sum ``size`` bytes over ``tp`` devices; ValueError for more than the table's."""
        if tp == 1:
            return 0.0
        key = min((known for known in self.bus if known >= tp), default=0)
        if not key:
            raise ValueError(f"tp: all-reduce is known up to {max(self.bus)} devices, not {tp}")
        moving = 2 * (tp - 1) / tp * size / self.bus[key]
        p = self.sharpness[key]
        return float((self.latency[key] ** p + moving**p) ** (1 / p))


def _all_reduce(**by_tp: tuple[float, float, float]) -> AllReduce:
    """From tp2=(microseconds, GB/s, p), ..."""
    table = {int(key[2:]): value for key, value in by_tp.items()}
    return AllReduce(
        MappingProxyType({tp: 1e-6 * us for tp, (us, _, _) in table.items()}),
        MappingProxyType({tp: 1e9 * rate for tp, (_, rate, _) in table.items()}),
        MappingProxyType({tp: p for tp, (_, _, p) in table.items()}),
    )


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as it stands in a node.

    ``flops`` dense BF16 flop/s of all ``processors`` (streaming multiprocessors), ``bandwidth``
    bytes/s and ``memory`` bytes of device memory; ``peer`` joins two GPUs of a node, ``host`` a GPU
    and host memory (KV that moves inside a node without a faster way crosses it), ``nic`` the node
    and the network (one for all its GPUs).
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    processors: int
    all_reduce: AllReduce
    peer: Link
    host: Link
    nic: Link
    gemm: Gemm
    attention: Attention
    streaming: float
    """Share of the bandwidth that elementwise kernels reach."""
    gpus: int = 8
    """GPUs in a node."""
    price: float = 1.0
    """Indicative US dollars an hour. An ASSUMPTION: the order of magnitude of on-demand list prices
    that GPU clouds published in 2025, from no one vendor. Only ratios between systems on the same
    GPU are meant; give your own price for anything else."""
    source: str = "extrapolated"
    """"fitted" if ``gemm`` was fitted to this GPU's measured kernels; else where it comes from."""


# Made by `python -m ecoserve.sim.efficiency TABLES`, rounded; docs/cost-model.md has the tables.
_A100 = Gemm(compute=0.858, memory=0.808, sharpness=2.25, ramp=5.0e-6, edge=10.4, wave=0.22)
_A40 = Gemm(compute=0.858, memory=0.767, sharpness=2.32, ramp=3.1e-6, edge=6.2, wave=0.46)
_H100 = Gemm(compute=1.114, memory=0.919, sharpness=3.26, ramp=6.1e-6, edge=43.2, wave=0.29)
_L40S = Gemm(compute=0.655, memory=0.769, sharpness=2.51, ramp=0.0, edge=1.4, wave=0.0)
_L40S_ATTENTION = Attention(prefill=0.544, half=602, decode=0.797, pad=26)
_A100_ATTENTION = Attention(prefill=0.585, half=683, decode=0.687, pad=24)
_H100_ATTENTION = Attention(prefill=0.706, half=1502, decode=0.890, pad=114)
_H200_ATTENTION = Attention(prefill=0.698, half=1428, decode=0.861, pad=183)
# The L20 has the die, memory and PCIe of the L40S and a third of its rated flop/s, of which it
# reaches more (published prefill rates imply 0.60-0.70): large products reach 0.70 with this.
_L20 = replace(_L40S, compute=0.711)

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
# (they imply 7-13), and is the figure to sweep: results depend on it more than on any other. The
# latencies are the L40S's.
_L20_BUS = _all_reduce(tp2=(5, 10, 1), tp4=(13, 10, 1), tp8=(25, 10, 1))
_L40S_BUS = _all_reduce(tp2=(5.3, 19.1, 0.96), tp4=(13.2, 3.8, 1.16), tp8=(25.3, 2.0, 1.95))
_A800_PCIE_BUS = _all_reduce(tp2=(5, 20, 1), tp4=(13, 20, 1), tp8=(25, 20, 1))
_A100_BUS = _all_reduce(tp2=(5.0, 180, 1.0), tp4=(5.0, 211, 0.63), tp8=(5.4, 230, 0.52))
# NVLink of 400 instead of 600 GB/s.
_A800_BUS = _all_reduce(tp2=(5.0, 120, 1.0), tp4=(5.0, 141, 0.63), tp8=(5.4, 153, 0.52))
_H100_BUS = _all_reduce(tp2=(4.2, 277, 0.91), tp4=(4.4, 341, 0.66), tp8=(4.6, 474, 0.54))

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="L20", flops=119.5e12, bandwidth=864e9, memory=48e9, processors=92,
            all_reduce=_L20_BUS, peer=_PCIE4, host=_PCIE4, nic=_TCP_10G,
            gemm=_L20, attention=_L40S_ATTENTION, streaming=0.80,
            price=0.60, source="extrapolated from L40S",
        ),
        Gpu(
            name="L40S", flops=362e12, bandwidth=864e9, memory=48e9, processors=142,
            all_reduce=_L40S_BUS, peer=_PCIE4, host=_PCIE4, nic=_ROCE_25G,
            gemm=_L40S, attention=_L40S_ATTENTION, streaming=0.80,
            price=1.00, source="fitted",
        ),
        Gpu(
            name="A40", flops=149.7e12, bandwidth=696e9, memory=48e9, processors=84,
            all_reduce=_L20_BUS, peer=_PCIE4, host=_PCIE4, nic=_ROCE_25G,
            gemm=_A40, attention=_L40S_ATTENTION, streaming=0.80,
            price=0.50, source="fitted",
        ),
        Gpu(
            name="A800-PCIe", flops=312e12, bandwidth=1.935e12, memory=80e9, processors=108,
            all_reduce=_A800_PCIE_BUS, peer=_PCIE4, host=_PCIE4, nic=_ROCE_25G,
            gemm=_A100, attention=_A100_ATTENTION, streaming=0.60,
            price=1.40, source="extrapolated from A100",
        ),
        Gpu(
            name="A800-SXM", flops=312e12, bandwidth=2.039e12, memory=80e9, processors=108,
            all_reduce=_A800_BUS, peer=_NVLINK_A800, host=_PCIE4, nic=_ROCE_100G,
            gemm=_A100, attention=_A100_ATTENTION, streaming=0.60,
            price=1.60, source="extrapolated from A100",
        ),
        Gpu(
            name="A100", flops=312e12, bandwidth=2.039e12, memory=80e9, processors=108,
            all_reduce=_A100_BUS, peer=_NVLINK_A100, host=_PCIE4, nic=_ROCE_100G,
            gemm=_A100, attention=_A100_ATTENTION, streaming=0.60,
            price=1.60, source="fitted",
        ),
        Gpu(
            name="H100", flops=989e12, bandwidth=3.35e12, memory=80e9, processors=132,
            all_reduce=_H100_BUS, peer=_NVLINK_H100, host=_PCIE5, nic=_IB_400G,
            gemm=_H100, attention=_H100_ATTENTION, streaming=0.69,
            price=2.60, source="fitted",
        ),
        Gpu(
            name="H200", flops=989e12, bandwidth=4.8e12, memory=141e9, processors=132,
            all_reduce=_H100_BUS, peer=_NVLINK_H100, host=_PCIE5, nic=_IB_400G,
            gemm=_H100, attention=_H200_ATTENTION, streaming=0.69,
            price=3.40, source="extrapolated from H100",
        ),
    )
}  # fmt: skip


def gpu(name: str) -> Gpu:
    """The GPU of that name, in any case; a ValueError lists the names otherwise."""
    for known, found in GPUS.items():
        if known.lower() == name.lower():
            return found
    raise ValueError(f"gpu: {name!r} is not known; known are {', '.join(GPUS)}")
