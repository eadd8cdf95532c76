"""DLPack views that claim to be CUDA memory: a kernel's host half can be called up to its launch without a GPU."""

import ctypes
import math

FLOAT, BFLOAT, INT = 2, 4, 0


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int), ("device_id", ctypes.c_int), ("ndim", ctypes.c_int),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    ]  # fmt: skip


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]
_keep = []  # views live as long as the process: their consumer's deleter does nothing
_nothing = _Deleter(lambda _: None)
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class _View:
    def __init__(self, shape, strides, code, bits, address):
        n = len(shape)
        self.shape, self.strides = (ctypes.c_int64 * n)(*shape), (ctypes.c_int64 * n)(*strides)
        tensor = _Tensor(address, 2, 0, n, code, bits, 1, self.shape, self.strides, 0)
        self.managed = _Managed(tensor, None, _nothing)
        _keep.append(self)

    def __dlpack__(self, **_):
        return _capsule(ctypes.addressof(self.managed), b"dltensor", None)

    def __dlpack_device__(self):
        return (2, 0)


def device_view(shape, strides=None, code=BFLOAT, bits=16, address=1 << 40):
    import tvm_ffi

    if strides is None:
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return tvm_ffi.from_dlpack(_View(shape, strides, code, bits, address))


def attention_views(ranks, rows, heads, head_dim):
    """What a rank passes to a kernel that stores to its peers: keys shared by all chunks, O and LSE spread over the
    peers' mappings, 2**37 bytes apart."""
    keys = device_view((ranks, ranks * rows, heads, head_dim), (0, heads * head_dim, head_dim, 1))
    peers = (2**36, ranks * heads * head_dim, head_dim, 1)
    return {
        "q": device_view((ranks, rows, heads, head_dim)),
        "k": keys,
        "v": keys,
        "o": device_view((ranks, rows, heads, head_dim), peers),
        "lse": device_view((ranks, heads, rows), (2**35, rows, 1), code=FLOAT, bits=32),
        "scale": head_dim**-0.5,
    }
