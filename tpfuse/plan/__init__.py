"""What a split of a model over machines would take: the devices, the networks and the collectives that it runs on."""

from .cluster import Cluster, Level
from .collectives import ALL_REDUCE, OWN, Link, Message, cheapest, seconds
from .devices import DEVICES, Device

__all__ = ["ALL_REDUCE", "DEVICES", "OWN", "Cluster", "Device", "Level", "Link", "Message", "cheapest", "seconds"]
