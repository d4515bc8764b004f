"""What the benchmarks of all ops share: inputs, counting, measuring, the card's roofline, tables and plots."""

from bench.harness.bench import Bench, Random, acc

__all__ = ["Bench", "Random", "acc"]
