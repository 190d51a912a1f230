"""The process beside the data: serves portals as they are and is the only authority on versions."""

from farside.hub.portal import PortalSpec
from farside.hub.server import Hub

__all__ = ["Hub", "PortalSpec"]
