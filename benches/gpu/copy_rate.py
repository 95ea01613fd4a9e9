"""Rate of bare copies to the GPU from pinned memory, by the driver alone: `{"gpu": NAME, "bytes_per_second": RATE}`.

Ends with exit code 3 and the reason on standard output if there is no GPU."""

import ctypes
import json
import mmap
import sys

SIZE = 256 << 20
COPIES = 16


def fail(reason: str) -> None:
    print(reason)
    sys.exit(3)


def main() -> None:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        fail("no CUDA driver on this machine")
    code = cuda.cuInit(0)
    if code:
        fail(f"the CUDA driver finds no GPU (code {code})")

    def check(name: str, *arguments: object) -> None:
        code = getattr(cuda, name)(*arguments)
        if code:
            sys.exit(f"{name}: code {code}")

    device, context, name = ctypes.c_int(), ctypes.c_void_p(), ctypes.create_string_buffer(128)
    check("cuDeviceGet", ctypes.byref(device), 0)
    check("cuDeviceGetName", name, 128, device)
    check("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    check("cuCtxSetCurrent", context)
    memory = mmap.mmap(-1, SIZE)
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    ctypes.memset(address, 1, SIZE)
    check("cuMemHostRegister_v2", address, ctypes.c_size_t(SIZE), 1)
    target, stream, begun, ended = ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    check("cuMemAlloc_v2", ctypes.byref(target), ctypes.c_size_t(SIZE))
    check("cuStreamCreate", ctypes.byref(stream), 1)
    check("cuEventCreate", ctypes.byref(begun), 0)
    check("cuEventCreate", ctypes.byref(ended), 0)
    best = 0.0
    for _ in range(3):
        check("cuEventRecord", begun, stream)
        for _ in range(COPIES):
            check("cuMemcpyHtoDAsync_v2", target, address, ctypes.c_size_t(SIZE), stream)
        check("cuEventRecord", ended, stream)
        check("cuEventSynchronize", ended)
        milliseconds = ctypes.c_float()
        check("cuEventElapsedTime", ctypes.byref(milliseconds), begun, ended)
        best = max(best, SIZE * COPIES / milliseconds.value * 1000)
    check("cuMemFree_v2", target)
    check("cuMemHostUnregister", address)
    print(json.dumps({"gpu": name.value.decode(), "bytes_per_second": best}))


main()
