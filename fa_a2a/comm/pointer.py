"""Torch tensors over memory that torch did not allocate: a peer's mapping, or several peers at one stride.

DLPack carries an address, a shape and strides, and nothing has to lie inside one allocation. The memory must outlive
the tensor; nothing here owns it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

_CPU, _CUDA = 1, 2
_UINT8 = (1, 8)  # DLPack type code (unsigned integer) and bits


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    pass


_DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))
_DLManagedTensor._fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _DELETER)]

_alive: dict[int, object] = {}  # exporters handed out, each until its consumer calls the deleter


def _forget(managed: Any) -> None:
    _alive.pop(ctypes.addressof(managed.contents), None)


_forget_callback = _DELETER(_forget)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class _Exporter:
    def __init__(
        self, address: int, shape: Sequence[int], strides: Sequence[int], code: int, bits: int, device: torch.device
    ):
        n = len(shape)
        self._device = (_CUDA, device.index or 0) if device.type == "cuda" else (_CPU, 0)
        self._shape, self._strides = (ctypes.c_int64 * n)(*shape), (ctypes.c_int64 * n)(*strides)
        tensor = _DLTensor(address, *self._device, n, code, bits, 1, self._shape, self._strides, 0)
        self._managed = _DLManagedTensor(tensor, None, _forget_callback)

    def __dlpack__(self, **_: object) -> object:
        pointer = ctypes.addressof(self._managed)
        _alive[pointer] = self
        return _new_capsule(pointer, b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def bytes_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 tensor of `nbytes` bytes at a raw address."""
    return from_dlpack(_Exporter(address, (nbytes,), (1,), *_UINT8, device))


def tensor_at(
    address: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Tensor at a raw address with any strides, in elements. The strides may step from one mapping to another."""
    codes = {torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.float32: (2, 32)}
    return from_dlpack(_Exporter(address, shape, strides, *codes[dtype], device))
