"""A CPU platform for verl: loaded in every process by VERL_USE_EXTERNAL_MODULES.

verl runs on accelerators only; its seam for others is a platform plugin. This one answers as if
the CPU were one, and mends the two places where verl takes that for granted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def nothing(*_: Any, **__: Any) -> int:
    return 0


class CpuDevice:
    """`torch.cpu`, and an answer to what else `torch.cuda` would be asked."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "mem_get_info":
            return lambda *_: (1 << 34, 1 << 34)
        if name == "get_device_name":
            return lambda *_: "CPU"
        return getattr(torch.cpu, name, nothing)


class Runtime:
    """What `cudart()` is asked for."""

    def __getattr__(self, name: str) -> Any:
        return nothing


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = "cpu"
    vendor_name = "generic"
    device_module: Any = CpuDevice()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    set_device = synchronize = set_allocator_settings = empty_cache = nothing
    profiler_start = profiler_stop = nothing

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CPU_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"  # verl counts nothing else; the loop declares logical ones

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return Runtime()


_init_process_group = torch.distributed.init_process_group


def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
    """verl asks for "cpu:gloo" and the device's backend, which here is the same one twice."""
    if backend == "cpu:gloo,cpu:gloo":
        backend = "gloo"
    return _init_process_group(backend, *args, **kwargs)


torch.distributed.init_process_group = init_process_group
