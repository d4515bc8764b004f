"""Flops that a model needs, and the share of the peak that a measured step reaches.

    model flops     forward + backward of all GEMMs and of attention's two products (all keys, causal or not), whatever
                    is recomputed
    hardware flops  with what is recomputed: "full" a whole forward once more; "selective" attention's products, which
                    Korthikanti et al. count with their backward (s / 3h in place of s / 6h; the forward alone would be
                    a third of what that adds)

For a GPT, 72 B s L h^2 (1 + s / 6h + V / 12 L h) and its kin: Narayanan et al. 2021 (arXiv:2104.04473), Korthikanti
et al. 2022 (arXiv:2205.05198).  MFU and HFU are these over seconds, devices and peak.
"""

import re
import time
from collections import deque
from typing import NamedTuple

from ...models.config.gpt import GPTConfig
from ...models.config.model import ModelConfig
from .shapes import Shape
from .text import quantity

RECOMPUTE = "none", "selective", "full"
PEAK = {  # dense 16-bit matrix flops a second, by the device's name without _COMMON
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100 PCIe": 312e12,
    "A100": 312e12,
    "MI300X": 1307e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "V100 PCIe": 112e12,
    "V100": 125e12,
}
_COMMON = re.compile(r"NVIDIA|AMD|Instinct|Tesla|SXM\d?|HBM\w+|\d+GB?", re.IGNORECASE)  # words of any peak


def known_peak(device_name: str) -> float | None:
    """Returns the dense 16-bit flops a second of a device; None where they are not known, as of another variant of a
    device in the table, or a part of one."""
    words = (word for word in re.split("[ -]", device_name) if not _COMMON.fullmatch(word))
    name = " ".join(words).replace("PCIE", "PCIe")
    return PEAK.get(name)


def forward_flops(config: ModelConfig, seq: int, batch: int) -> tuple[int, int, int]:
    """Returns the flops of one forward: (GEMMs of the layers, attention's products, logits).

    Of experts a token is multiplied with those that it has, and with the router.
    """
    kinds, tokens = Shape.kinds(config), batch * seq
    gemm, attention = sum(2 * s.L * s.used for s in kinds), sum(4 * seq * s.L * s.H * s.E for s in kinds)
    return tokens * gemm, tokens * attention, 2 * tokens * config.hidden_size * config.vocab_size


def model_flops(config: ModelConfig, seq: int, batch: int) -> int:
    """Returns the model flops of one step over ``batch`` sequences of ``seq``: backward is twice forward."""
    return 3 * sum(forward_flops(config, seq, batch))


def hardware_flops(config: ModelConfig, seq: int, batch: int, recompute: str = "none") -> int:
    """Returns the flops that run in a step, recomputation included.

    ``recompute``: "none", "selective" (attention) or "full" (every layer).  ValueError for another.
    """
    if recompute not in RECOMPUTE:
        raise ValueError(f"hardware_flops: recompute must be one of {', '.join(RECOMPUTE)}, got {recompute!r}")
    gemm, attention, _ = forward_flops(config, seq, batch)
    recomputed = {"none": 0, "selective": 3 * attention, "full": gemm + attention}[recompute]
    return model_flops(config, seq, batch) + recomputed


class Utilization(NamedTuple):
    """Per device: flops a second, and % of the peak (model and hardware flops)."""

    model_rate: float
    mfu: float
    hfu: float


def utilization(
    config: ModelConfig, *, seq: int, batch: int, seconds: float, devices: int, peak: float, recompute: str = "none"
) -> Utilization:
    """Returns the utilization of a step over ``batch`` sequences that took ``seconds`` on ``devices``.

    ``peak`` is a device's flops a second.  ValueError for a number that is not positive.
    """
    for name, value in (("seq", seq), ("batch", batch), ("seconds", seconds), ("devices", devices), ("peak", peak)):
        if not value > 0:
            raise ValueError(f"utilization: {name} must be positive, got {value}")
    share = 1 / (seconds * devices)
    model, hardware = model_flops(config, seq, batch) * share, hardware_flops(config, seq, batch, recompute) * share
    return Utilization(model, 100 * model / peak, 100 * hardware / peak)


class Published(NamedTuple):
    """A row of the table of Korthikanti et al. 2022: measured seconds per iteration, and its MFU and HFU in %."""

    name: str
    heads: int
    width: int
    layers: int
    tp: int
    pp: int
    devices: int
    batch: int
    full_seconds: float
    seconds: float
    mfu: float
    hfu: float

    @property
    def config(self) -> GPTConfig:
        """The model's sizes."""
        return GPTConfig(
            vocab_size=51200, max_positions=2048, hidden_size=self.width, num_layers=self.layers, num_heads=self.heads
        )

    def recomputed(self) -> Utilization:
        """Returns the utilization that the formulas here give for the row."""
        return utilization(
            self.config,
            seq=2048,
            batch=self.batch,
            seconds=self.seconds,
            devices=self.devices,
            peak=PEAK["A100"],
            recompute="selective",
        )


PUBLISHED = [
    Published(*row)
    for row in (
        ("22b", 64, 6144, 48, 8, 1, 8, 4, 1.42, 1.10, 41.5, 43.7),
        ("175b", 96, 12288, 96, 8, 8, 64, 64, 18.13, 13.75, 51.4, 52.8),
        ("530b", 128, 20480, 105, 8, 35, 280, 280, 49.05, 37.83, 56.0, 57.0),
        ("1t", 160, 25600, 128, 8, 64, 512, 512, 94.42, 71.49, 56.3, 57.0),
    )
]


class ThroughputMeter:
    """Measures tokens a second, model flops a second and device, and MFU where the peak is known.

        meter = ThroughputMeter(config, seq=2048, batch=64, devices=8, device_name=torch.cuda.get_device_name())
        for step in ...:
            meter.start()
            ...
            meter.stop()     # after something that waits for the device: the loss as a number
            print(meter)     # 123,456 tokens/s, 182 TFLOP/s a device, MFU 58.3 %

    ``batch``: sequences per step over all devices.  Numbers are means of the last ``window`` steps.  The time between
    stop and start (a checkpoint) is not counted.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        seq: int,
        batch: int,
        devices: int = 1,
        peak: float | None = None,
        device_name: str = "",
        window: int = 20,
    ):
        self.tokens, self.devices = batch * seq, devices
        self.flops_per_token = model_flops(config, seq, batch) / self.tokens
        self.peak = known_peak(device_name) if peak is None else peak
        self._steps: deque[tuple[float, int]] = deque(maxlen=window)  # seconds, tokens
        self._began: float | None = None

    def start(self) -> None:
        """Begins a step."""
        self._began = time.perf_counter()

    def stop(self, tokens: int | None = None) -> None:
        """Ends a step of ``tokens`` (default: batch x seq).  ValueError without start()."""
        if self._began is None:
            raise ValueError("ThroughputMeter: stop() without start()")
        self._steps.append((time.perf_counter() - self._began, self.tokens if tokens is None else tokens))
        self._began = None

    @property
    def seconds(self) -> float | None:
        """Seconds per step; None before the first."""
        return sum(seconds for seconds, _ in self._steps) / len(self._steps) if self._steps else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second; None before the first step."""
        if not self._steps:
            return None
        return sum(tokens for _, tokens in self._steps) / sum(seconds for seconds, _ in self._steps)

    @property
    def last_tokens_per_s(self) -> float | None:
        """Tokens a second of the last step alone; None before the first."""
        return self._steps[-1][1] / self._steps[-1][0] if self._steps else None

    @property
    def flops_per_s(self) -> float | None:
        """Model flops a second and device; None before the first step."""
        rate = self.tokens_per_s
        return None if rate is None else self.flops_per_token * rate / self.devices

    @property
    def mfu(self) -> float | None:
        """Model flops utilisation in %; None where the peak is not known, and before the first step."""
        rate = self.flops_per_s
        return None if self.peak is None or rate is None else 100 * rate / self.peak

    def __str__(self) -> str:
        tokens, flops, mfu = self.tokens_per_s, self.flops_per_s, self.mfu
        if tokens is None or flops is None:
            return "- tokens/s"
        share = "" if mfu is None else f", MFU {mfu:.1f} %"
        return f"{tokens:,.0f} tokens/s, {quantity(flops, 'FLOP/s')} a device{share}"
