"""Foreign arrays and streams: what an operation accepts besides our own slices, and what a device takes as a stream.

NumPy arrays and DLPack tensors of the host on the host device, DLPack tensors and anything with
`__cuda_array_interface__` on a CUDA device, are used in place. What cannot be used as it stands (a stride, a dtype,
another device, a read-only output) is refused; nothing is copied behind the caller's back.

An object with both protocols is asked for DLPack: it orders its own work before the device's stream, it names the
device, and it knows bfloat16, none of which torch's array interface does. A tensor that requires grad is refused
either way (give `t.detach()`: writing into it would pass by autograd).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from math import prod
from typing import Any, NoReturn

import numpy as np

from memra_driver import dlpack, driver
from memra_driver.dlpack import shown
from memra_driver.errors import ArrayError, ConfigError, DeviceMismatch, DriverError, MemraError
from memra_driver.place import ordinal

HOST = -1
LEGACY_STREAM = 1  # the handles below 3 are the driver's default streams: 0 and 1 legacy, 2 one per thread
PER_THREAD_STREAM = 2
_BITS = np.dtype(np.uint16)  # what bfloat16 travels as
# What the driver says of a stream that is none, or that captures; of all else the stream knows nothing.
_NO_STREAM = frozenset({driver.INVALID_VALUE, driver.INVALID_CONTEXT, driver.INVALID_HANDLE, *range(900, 909)})


@dataclass(frozen=True)
class Operand:
    """Memory of an argument: `len` elements of `dtype` at `ptr`; `owner` keeps it alive."""

    ptr: int
    len: int
    dtype: np.dtype[Any]
    nbytes: int
    device: int
    owner: Any


def operand(
    value: Any, name: str, columns: Sequence[int], dtypes: Sequence[Any], e: Any, *, rows: int | None, out: bool,
    batch: int | None = None, bare: bool = False,
) -> Operand:  # fmt: skip
    """The memory behind one argument, checked: C-contiguous, [rows, *columns], one of `dtypes`, on device e.

    rows None: any number of rows. batch: so many blocks of them,
    [batch, rows, *columns]. A flat slice needs the right number of elements; an array needs
    the shape itself; bare: a single row may come without its leading 1, a single element without any dimension.
    uint16 stands for bfloat16 too. Raises ArrayError naming the argument.

    e's stream waits for the work that the array's protocol tells of; the host does not. While a capture is open
    nothing waits, since nothing runs, and the graph keeps the array.
    """
    device = ordinal(e)
    wanted = [np.dtype(dtype) for dtype in dtypes]
    shape: tuple[int, ...] | None = None
    stream: int | None = None
    if getattr(value, "is_closed", False) is True:
        raise ArrayError(f"{name} is closed: {shown(value)}")
    if isinstance(value, np.ndarray):
        found, shape = _from_numpy(value, name, out), value.shape
    elif is_slice(value):
        found = _from_slice(value, name, device)
    elif hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        found, shape = _from_dlpack(value, name, wanted, out, e)
    else:
        found, shape, stream = _from_cuda_array(value, name, out, e)
    if found.device != device:
        _refuse_device(name, found.device, device)
    if found.dtype not in wanted:
        if found.dtype.name != "bfloat16" or _BITS not in wanted:
            _refuse_dtype(name, found.dtype, wanted)
        found = replace(found, dtype=_BITS)
    if bare and shape in ((*columns,), ()):
        shape = None
    _check_shape(found.len, shape, name, columns, rows, batch)
    if found.len and found.ptr % found.dtype.itemsize:
        raise ArrayError(
            f"{name} lies at 0x{found.ptr:x}, which is not aligned to its {found.dtype.itemsize}-byte elements"
        )
    if found.len and not found.ptr:
        raise ArrayError(f"{name} has {found.len} elements and no memory: it was freed")
    if stream is not None and found.len:
        _follow(e, name, stream)
    recording = getattr(e, "recording", None)
    if recording is not None:
        recording.kept.append(found.owner)
    return found


def vector(value: Any, name: str, length: int, e: Any) -> Operand:
    """A one-dimensional f32 input of exactly `length` elements, as `operand` checks it."""
    return operand(value, name, (), (np.float32,), e, rows=length, out=False)


def is_slice(value: Any) -> bool:
    """Whether value is what a device calls a slice; its length is in elements and it has no shape."""
    return all(hasattr(value, field) for field in ("ptr", "len", "dtype", "nbytes"))


def refuse_overlap(outputs: dict[str, Operand], inputs: dict[str, Operand]) -> None:
    """Raises ArrayError when an output shares memory with an input or another output."""
    everything = [*outputs.items(), *inputs.items()]
    spans = sorted((each.ptr, each.ptr + each.nbytes) for _, each in everything if each.len)
    if all(end <= begin for (_, end), (begin, _) in pairwise(spans)):  # a batch has many buffers
        return
    for i, (name, out) in enumerate(outputs.items()):
        for other, each in everything[i + 1 :]:
            if out.len and each.len and out.ptr < each.ptr + each.nbytes and each.ptr < out.ptr + out.nbytes:
                raise ArrayError(
                    f"{name} and {other} share memory; other rows of {other} are still read while {name} is written"
                )


def stream_handle(foreign: Any, device: int) -> int:
    """The handle of an int, an object with `__cuda_stream__`, or one of torch's or CuPy's streams.

    Raises ConfigError for what is none, DeviceMismatch where the object names another device than `device`.
    """
    for name in ("device_index", "device_id"):  # torch, CuPy; -1 where it is not bound to one
        theirs = getattr(foreign, name, None)
        if isinstance(theirs, int) and theirs not in (-1, device):
            raise DeviceMismatch(f"{shown(foreign)} is a stream of device {shown(theirs)}, not of device {device}")
    handle = _handle_of(foreign)
    if isinstance(handle, bool) or not isinstance(handle, (int, np.integer)) or not 0 <= handle < 1 << 64:
        raise ConfigError(
            f"{shown(foreign)} is no stream: give a handle (int), an object with __cuda_stream__, or a torch or"
            " CuPy stream"
        )
    return int(handle)


def _handle_of(foreign: Any) -> Any:
    protocol = getattr(foreign, "__cuda_stream__", None)
    if protocol is None:
        for name in ("cuda_stream", "ptr"):  # torch before 2.10, CuPy
            if hasattr(foreign, name):
                return getattr(foreign, name)
        return foreign
    told = protocol() if callable(protocol) else protocol
    if not isinstance(told, (tuple, list)) or len(told) != 2:
        raise ConfigError(f"__cuda_stream__ of {_kind(foreign)} gives {shown(told)}, not (version, handle)")
    if told[0] != 0:
        raise ConfigError(f"__cuda_stream__ of {_kind(foreign)} speaks version {shown(told[0])}, we know version 0")
    return told[1]


def same_stream(a: int, b: int) -> bool:
    """Whether two handles are one stream; 0 is the legacy default stream, as 1 is."""
    return (a or LEGACY_STREAM) == (b or LEGACY_STREAM)


def _follow(e: Any, name: str, stream: int) -> None:
    """Orders e's stream behind `stream`, on which an array is filled.

    A recorded operation runs when its graph does and cannot wait for what is enqueued now. Work of a stream that is
    captured itself is part of the graph, and whoever forked it from e's stream joins it.
    """
    if e.recording is None:
        try:
            e.stream.wait_stream(stream)
        except DriverError as error:
            if error.code not in _NO_STREAM:
                raise
            raise ArrayError(f"{name} is filled on stream 0x{stream:x}, which cannot be waited for: {error}") from error
    elif not same_stream(stream, e.stream.handle) and not (
        stream > PER_THREAD_STREAM and driver.stream_is_capturing(stream)
    ):
        raise ArrayError(
            f"{name} is filled on stream 0x{stream:x}, and a recorded operation cannot wait for it:"
            " fill it on the device's own stream, or give it with stream None and order it before each launch"
        )


def _from_numpy(array: np.ndarray[Any, Any], name: str, out: bool) -> Operand:
    if not array.flags.c_contiguous:
        raise ArrayError(f"{name} is strided {list(array.strides)}; it must be C-contiguous")
    if out and not array.flags.writeable:
        raise ArrayError(f"{name} is read-only and would be written")
    return Operand(array.ctypes.data, array.size, array.dtype, array.nbytes, HOST, array)


def _from_slice(value: Any, name: str, device: int) -> Operand:
    try:
        ptr, length, dtype = operator.index(value.ptr), operator.index(value.len), np.dtype(value.dtype)
        where = operator.index(getattr(value, "device", device))
    except MemraError:  # one of our own slices says itself what it is
        raise
    except Exception as error:
        raise ArrayError(f"{name} is a {_kind(value)} that cannot be read: {shown(error)}") from error
    return _claimed(name, ptr, (length,), dtype, where, value)


def _from_dlpack(
    value: Any, name: str, wanted: list[np.dtype[Any]], out: bool, e: Any
) -> tuple[Operand, tuple[int, ...]]:
    device = ordinal(e)
    try:
        kind, index = (int(each) for each in value.__dlpack_device__())
        where = _place(kind, index, device)
    except Exception as error:
        raise ArrayError(f"{name} does not say where it lives: {shown(error)}") from error
    if where != device:
        _refuse_device(name, where, device)
    asked: dict[str, Any] = {}
    if device != HOST:
        asked["stream"] = dlpack.NO_SYNC if e.recording is not None else e.stream.handle or LEGACY_STREAM
    try:
        try:
            capsule = value.__dlpack__(**asked, max_version=dlpack.VERSION, copy=False)
        except TypeError:  # a producer of the protocol as it was before 2023.12
            capsule = value.__dlpack__(**asked)
        tensor = dlpack.read(capsule)
        handed = _place(*tensor.device, device)
    except Exception as error:  # whatever a foreign library raises: it does not export this array
        raise ArrayError(f"{name} is a {_kind(value)} that DLPack cannot take: {shown(error)}") from error
    if handed != where:
        raise ArrayError(f"{name} says that it lives on {_where(where)} and hands over memory of {_where(handed)}")
    if tensor.dtype is None or (tensor.type_name == "bfloat16" and _BITS not in wanted):
        _refuse_dtype(name, tensor.type_name, wanted)
    if tensor.flags & dlpack.IS_COPIED:
        raise ArrayError(f"{name} is a {_kind(value)} that hands over a copy of itself")
    if out and tensor.flags & dlpack.READ_ONLY:
        raise ArrayError(f"{name} is read-only and would be written")
    found = _claimed(name, tensor.ptr, tensor.shape, tensor.dtype, where, (capsule, value))
    _check_strides(name, tensor.shape, tensor.strides, 1)
    if device != HOST and found.len:  # what is empty may have any address
        lies = _device_of(name, found.ptr, e)
        if tensor.device[0] == dlpack.CUDA:  # managed memory is every GPU's, whichever one it was allocated for
            found = replace(found, device=lies)
    return found, tensor.shape


def _place(kind: int, index: int, device: int) -> int:
    """The ordinal of a DLPack device; managed memory is wherever a GPU asks for it."""
    if kind in (dlpack.CUDA, dlpack.CUDA_MANAGED) and not 0 <= index < 1 << 31:
        raise ValueError(f"GPU {index}")  # -1 would be the host
    if kind in (dlpack.CPU, dlpack.CUDA_HOST):
        return HOST
    if kind == dlpack.CUDA or (kind == dlpack.CUDA_MANAGED and device == HOST):
        return index
    if kind == dlpack.CUDA_MANAGED:
        return device
    raise ValueError(f"DLPack device type {kind}")


def _from_cuda_array(value: Any, name: str, out: bool, e: Any) -> tuple[Operand, tuple[int, ...], int | None]:
    try:
        interface = getattr(value, "__cuda_array_interface__", None)
    except Exception as error:  # a property that refuses with another error than AttributeError
        raise ArrayError(f"{name} is a {_kind(value)} that cannot be taken: {shown(error)}") from error
    if interface is None:
        raise ArrayError(
            f"{name} is a {_kind(value)}; it takes a CudaSlice, a DLPack tensor, an array with"
            " __cuda_array_interface__, or a NumPy array on the host device"
        )
    try:
        shape = _integers(interface["shape"])
        dtype = np.dtype(interface["typestr"])
        ptr, read_only = operator.index(interface["data"][0]), bool(interface["data"][1])
        strides = interface.get("strides")
        strides = None if strides is None else _integers(strides)
        stream = interface.get("stream")
        stream = None if stream is None else operator.index(stream)
        masked = interface.get("mask") is not None
    except Exception as error:  # whatever stands in a foreign library's fields
        why = f"{_kind(error)}: {shown(error)}"
        raise ArrayError(f"{name} has a __cuda_array_interface__ that cannot be read: {why}") from error
    if stream is not None and not 0 < stream < 1 << 64:
        raise ArrayError(f"{name} names stream {shown(stream)}; the interface has 1, 2, handles and None")
    if masked:
        raise ArrayError(f"{name} is masked")
    if out and read_only:
        raise ArrayError(f"{name} is read-only and would be written")
    found = _claimed(name, ptr, shape, dtype, HOST, value)
    _check_strides(name, shape, strides, dtype.itemsize)
    return replace(found, device=_device_of(name, ptr, e)), shape, stream


def _integers(sequence: Any) -> tuple[int, ...]:
    """Lengths or strides, one more than an array may have at most: what names more needs not be read."""
    return tuple(operator.index(each) for each in islice(iter(sequence), dlpack.MAX_DIMS + 1))


def _claimed(name: str, ptr: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: int, owner: Any) -> Operand:
    """What a foreign object says of itself as an operand; refused where no memory can be that."""
    if len(shape) > dlpack.MAX_DIMS or not all(0 <= length < 1 << 63 for length in shape):
        raise ArrayError(f"{name} has shape {shown(list(shape))}, which no array has")
    size = prod(shape)
    nbytes = size * dtype.itemsize
    if not 0 <= ptr <= (1 << 64) - max(nbytes, 1):
        raise ArrayError(f"{name} has {nbytes} bytes at {shown(ptr)}, which is no address of that much memory")
    return Operand(ptr, size, dtype, nbytes, device, owner)


def _device_of(name: str, ptr: int, e: Any) -> int:
    """The GPU that an address belongs to, by the driver's word: one query, which a capture allows too."""
    device = ordinal(e)
    if device == HOST:
        raise ArrayError(f"{name} lives on a GPU, the layer on the host")
    if not ptr:
        return device
    e.stream.context.bind_alive()
    try:
        return driver.pointer_get_attribute("DEVICE_ORDINAL", ptr)
    except DriverError as error:
        if error.code != driver.INVALID_VALUE:
            raise
        raise ArrayError(f"{name} lies at 0x{ptr:x}, where the driver knows no memory: {error}") from error


def _check_strides(name: str, shape: tuple[int, ...], strides: tuple[int, ...] | None, step: int) -> None:
    """Refuses what is not in C order; `step` is the stride of neighbours. Lengths 0 and 1 leave strides open."""
    if strides is None or not prod(shape):
        return
    expected: list[int] = []
    for length in reversed(shape):
        expected.insert(0, step)
        step *= length
    if len(strides) != len(shape) or any(s != e for s, e, n in zip(strides, expected, shape, strict=True) if n > 1):
        raise ArrayError(f"{name} is strided {shown(list(strides))}; it must be C-contiguous")


def _check_shape(
    length: int, shape: tuple[int, ...] | None, name: str, columns: Sequence[int], rows: int | None, batch: int | None
) -> None:
    lead = () if batch is None else (batch,)
    wanted = (*lead, "rows" if rows is None else rows, *columns)
    per_row = prod(columns) * prod(lead)
    if shape is not None and (
        len(shape) != len(wanted) or any(w not in ("rows", n) for w, n in zip(wanted, shape, strict=True))
    ):
        raise ArrayError(f"{name} has shape {list(shape)}; it takes [{', '.join(map(str, wanted))}]")
    if length % per_row or (rows is not None and length != rows * per_row):
        raise ArrayError(f"{name} has {length} elements; it takes [{', '.join(map(str, wanted))}]")


def _refuse_device(name: str, found: int, device: int) -> NoReturn:
    raise ArrayError(f"{name} lives on {_where(found)}, the layer on {_where(device)}")


def _refuse_dtype(name: str, found: object, wanted: list[np.dtype[Any]]) -> NoReturn:
    raise ArrayError(f"{name} has dtype {shown(found)}; it takes {' or '.join(str(dtype) for dtype in wanted)}")


def _where(device: int) -> str:
    return "the host" if device == HOST else f"cuda:{shown(device)}"


def _kind(value: Any) -> str:
    return shown(type(value).__name__)
