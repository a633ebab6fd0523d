"""Memory with known surroundings: arrays that end or begin at an unreadable page, and files of gigabytes that hold only what
was written. Knows nothing of the operator."""

import ctypes
import mmap
import os

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def guarded(array, side="back"):
    """A copy of `array`, in C order, whose last (side "back") or first (side "front") byte lies next to an unreadable page."""
    page = mmap.PAGESIZE
    size = max(1, -(-array.nbytes // page)) * page
    room = np.frombuffer(mmap.mmap(-1, size + 2 * page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    for start in (0, page + size):
        if _libc.mprotect(room.ctypes.data + start, page, 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = page + (size - array.nbytes if side == "back" else 0)
    copy = np.ndarray(array.shape, array.dtype, room, offset)
    copy[...] = array
    return copy


class Sparse:
    """`size` zero bytes of which only those that are written take memory."""

    def __init__(self, size):
        self.file = os.memfd_create("kvquant-tests")
        os.ftruncate(self.file, size)
        self.bytes = np.frombuffer(mmap.mmap(self.file, size), np.uint8)

    def __del__(self):
        os.close(self.file)

    def contents(self):
        """Everything that is not zero: page number to the page's bytes."""
        found, end = {}, 0
        while True:
            try:
                start = os.lseek(self.file, end, os.SEEK_DATA)
            except OSError:  # no data beyond `end`
                return found
            end = os.lseek(self.file, start, os.SEEK_HOLE)
            for offset in range(start, end, mmap.PAGESIZE):
                data = os.pread(self.file, mmap.PAGESIZE, offset)
                if any(data):
                    found[offset // mmap.PAGESIZE] = data
