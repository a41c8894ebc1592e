"""The only place that knows which device computes: CUDA, or the CPU itself.

Everything above speaks to the `Accelerator` protocol; a simulated one stands in for hardware in the tests.
"""

from zerooffload.accelerator.api import Accelerator, DeviceRange, Event, Mark, Stream
from zerooffload.accelerator.choose import DeviceModel, default_accelerator, device_models, use_device_of
from zerooffload.accelerator.cuda import cached_block_nbytes
from zerooffload.accelerator.pages import PageRange, host_buffer_nbytes, populated_pages
from zerooffload.accelerator.shared_pages import SharedAddress, SharedPages, shared_part_nbytes

__all__ = [
    "Accelerator",
    "DeviceModel",
    "DeviceRange",
    "Event",
    "Mark",
    "PageRange",
    "SharedAddress",
    "SharedPages",
    "Stream",
    "cached_block_nbytes",
    "default_accelerator",
    "device_models",
    "host_buffer_nbytes",
    "populated_pages",
    "shared_part_nbytes",
    "use_device_of",
]
