"""The only place that knows which device computes: CUDA, or the CPU itself.

Everything above speaks to the `Accelerator` protocol; a simulated one stands in for hardware in the tests.
"""

from zerooffload.accelerator.api import Accelerator, DeviceRange, Event, Mark, Stream
from zerooffload.accelerator.choose import default_accelerator
from zerooffload.accelerator.pages import PageRange, host_buffer_nbytes, populated_pages

__all__ = [
    "Accelerator",
    "DeviceRange",
    "Event",
    "Mark",
    "PageRange",
    "Stream",
    "default_accelerator",
    "host_buffer_nbytes",
    "populated_pages",
]
