"""The Driver of the emulated device: recording, patching and replaying graphs without a GPU.

A recorded node keeps nothing but bytes of what it works on, laid out like the argument buffer of a CUDA kernel:

    header | pointer, number of elements [, stale word] | ... | scalar as C bytes [, stale bytes] | ... | stale word

A replay takes its pointers and scalars from these bytes, so a word that was not patched reads old memory. As in real
argument buffers there is padding, and it holds what was left there: addresses of tensors used earlier, now and then
that of an operand. Only a word that moved with an operand between two recordings says anything.
"""

# What keeps dispatch modes of the user's out of a replay is private in torch.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import collections
import ctypes
import dataclasses
import functools
import struct
import traceback
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

import torch
from torch.utils import _pytree as pytree  # checked with torch 2.11 and 2.13; public as torch.utils._pytree
from typing_extensions import override  # torch depends on it

from pygraph.errors import ArgumentError, CaptureError, describe
from pygraph.ir import ops
from pygraph.ir.descriptors import Mechanism
from pygraph.process import turns
from pygraph.process.collection import no_collection
from pygraph.runtime.driver import (
    Costs,
    Counters,
    Driver,
    NodeMechanism,
    Pool,
    RecordedGraph,
    RecordedNode,
    Run,
    Wiring,
)
from pygraph.runtime.emulated import device
from pygraph.runtime.emulated import tensors as memory
from pygraph.runtime.emulated import turns as emulated_turns
from pygraph.runtime.emulated import wiring as emulated_wiring
from pygraph.runtime.emulated.memory import EmulatedPool
from pygraph.runtime.emulated.wiring import Step

T = TypeVar("T")

HIDES_POINTERS: Final = frozenset({"aten::cumprod.out", "aten::_logcumsumexp", "aten::linalg_qr.out"})
"""Operations whose nodes hold one pointer, to a table in device memory in which the pointers to their operands are.

They stand for kernels whose pointers cannot be found among the arguments (multi-tensor kernels with long lists,
libraries with workspaces): whoever replays them with other inputs must notice that these are not read.
"""

_LAUNCH_US: Final = 5.0
_REPLAY_US: Final = 3.0
_NODE_US: Final = 0.5
_PATCH_US: Final = 0.3
_COPY_US: Final = 4.0
_COPY_BYTES_PER_US: Final = 1e5

_MEASURED_RUNS: Final = 3
"""How often what is measured is run. CUDA runs it up to a hundred times; a third run already meets what a first one and
a second one have left behind, and the model needs no more."""

_ALIGNMENT: Final = 16  # the widest load of a GPU thread


# ---- parameters ------------------------------------------------------------------------------------------------


class _Stale:
    """What padding holds: addresses that were passed to earlier kernels, in no order."""

    def __init__(self) -> None:
        self._seen: collections.deque[int] = collections.deque([0x7F00_0000_0000], maxlen=64)
        self._state = 1

    def word(self) -> bytes:
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % 2**64  # Knuth's MMIX generator
        return struct.pack("<Q", self._seen[(self._state >> 33) % len(self._seen)])

    def see(self, address: int) -> None:
        self._seen.append(address)


_stale: Final = _Stale()


class _Leaf(Protocol):
    def read(self, params: bytes, pointers: bytes) -> Any:
        """The value for a replay."""
        ...


@dataclasses.dataclass(frozen=True)
class _Constant:
    """An argument that is no data: a dtype, None, a flag."""

    value: Any

    def read(self, params: bytes, pointers: bytes) -> Any:
        return self.value


@dataclasses.dataclass(frozen=True)
class _Number:
    """A Python number as a C ``double``, ``long`` or two doubles."""

    offset: int
    format: str

    def read(self, params: bytes, pointers: bytes) -> Any:
        parts = struct.unpack_from(self.format, params, self.offset)
        return complex(*parts) if len(parts) == 2 else parts[0]


@dataclasses.dataclass(frozen=True)
class _HostScalar:
    """A number in a tensor dtype: a 0-d CPU tensor, or (``plain``) a Python number."""

    offset: int
    dtype: torch.dtype
    plain: bool

    def read(self, params: bytes, pointers: bytes) -> Any:
        data = bytearray(params[self.offset : self.offset + self.dtype.itemsize])
        scalar = torch.frombuffer(data, dtype=self.dtype)[0]
        return scalar.item() if self.plain else scalar


@dataclasses.dataclass(frozen=True)
class _Operand:
    """A tensor of the device: everything but its address."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    alignment: int
    conjugate: bool = False
    negative: bool = False

    def read(self, params: bytes, pointers: bytes) -> torch.Tensor:
        address = self.address(pointers)
        view = memory.host_view_at(address, self.shape, self.stride, self.dtype)
        view = view.conj() if self.conjugate else view
        return torch._neg_view(view) if self.negative else view

    def address(self, pointers: bytes) -> int:
        """The address in the bytes, if a tensor may be there."""
        (address,) = struct.unpack_from("<Q", pointers, self.offset)
        if 0 in self.shape:
            return 0
        if address % self.alignment:
            raise RuntimeError(
                f"emu error: misaligned address: {address:#x} is no multiple of {self.alignment}, as when recorded"
            )
        memory.allocator.check_range(address, memory.span_bytes(self.shape, self.stride, self.dtype))
        return address


class _Packer:
    """Lays out the parameters of one node."""

    def __init__(self, name: str, *, hidden: bool) -> None:
        self._hash = zlib.crc32(name.encode())
        self._hidden = hidden
        self.params = bytearray(struct.pack("<QQ", self._hash, 0))
        self.pointers = bytearray() if hidden else self.params
        if hidden:
            self.params += bytes(8)  # of the table, known at the end
        self.addresses: list[int] = []

    def tensor(self, tensor: torch.Tensor) -> _Operand:
        address = tensor.data_ptr()
        offset = len(self.pointers)
        self.pointers += struct.pack("<QQ", address, tensor.numel())
        if self._hash >> len(self.addresses) % 32 & 1:
            self.pointers += _stale.word()
        self.addresses.append(address)
        return _Operand(
            offset,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            min(_ALIGNMENT, address & -address) if address else 1,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def scalar(self, value: torch.Tensor, *, plain: bool) -> _HostScalar:
        data = bytes(value.contiguous().reshape(1).view(torch.uint8).tolist())
        return _HostScalar(self._bytes(data), value.dtype, plain)

    def leaf(self, value: Any, fill: torch.dtype | None) -> _Leaf:
        """Lay out one argument; numbers in the dtype ``fill`` where the kernel takes them so."""
        if memory.is_emulated(value):
            return self.tensor(value)
        if isinstance(value, torch.Tensor):
            return self.scalar(value, plain=False)
        if isinstance(value, (int, float, complex)) and fill is not None:
            return self.scalar(torch.full((), value, dtype=fill, device="cpu"), plain=True)
        if isinstance(value, float):
            return _Number(self._bytes(struct.pack("<d", value)), "<d")
        if isinstance(value, complex):
            return _Number(self._bytes(struct.pack("<dd", value.real, value.imag)), "<dd")
        if isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
            return _Number(self._bytes(struct.pack("<q", value)), "<q")
        return _Constant(torch.device("cpu") if isinstance(value, torch.device) else value)

    def finish(self) -> torch.Tensor | None:
        """Pad the parameters; returns the table of the pointers if they are hidden."""
        table = None
        if self._hidden:
            # Outside the recording's pool, where earlier nodes of the graph may write before this one reads it.
            pool, memory.allocator.current = memory.allocator.current, memory.allocator.default
            try:
                table = memory.allocate((len(self.pointers),), (1,), torch.uint8, own=False)
            finally:
                memory.allocator.current = pool
            struct.pack_into("<Q", self.params, 16, table.data_ptr())
        self.params += _stale.word()
        for address in self.addresses:
            _stale.see(address)
        return table

    def _bytes(self, data: bytes) -> int:
        offset = len(self.params)
        self.params += data
        self.params += _stale.word()[: -len(data) % 8]
        return offset


# ---- nodes -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Kernel:
    """A node that runs a kernel; ``table`` is where its pointers are, if they are hidden."""

    kernel: Callable[..., Any]
    leaves: tuple[_Leaf, ...]
    spec: pytree.TreeSpec
    outputs: tuple[_Operand | None, ...]
    table: torch.Tensor | None
    table_bytes: bytes

    def run(self, params: bytes) -> None:
        pointers = params
        if self.table is not None:
            (address,) = struct.unpack_from("<Q", params, 16)
            memory.allocator.check_range(address, len(self.table_bytes))
            pointers = ctypes.string_at(address, len(self.table_bytes))
        args, kwargs = pytree.tree_unflatten([leaf.read(params, pointers) for leaf in self.leaves], self.spec)
        targets = [output and output.read(params, pointers) for output in self.outputs]
        results = pytree.tree_leaves(self.kernel(*args, **kwargs))
        for target, result in zip(targets, results, strict=False):
            if target is not None:
                target.copy_(result)


@dataclasses.dataclass(frozen=True, eq=False)
class _Memcpy:
    """A node that copies bytes."""

    source: _Operand
    target: _Operand

    def run(self, params: bytes) -> None:
        source, target = self.source.read(params, params), self.target.read(params, params)
        target.copy_(source)


@dataclasses.dataclass(frozen=True, eq=False)
class _Memset:
    """A node that sets every byte to one value."""

    target: _Operand

    def run(self, params: bytes) -> None:
        target = self.target.read(params, params)
        # A dimension of size one may have any stride, which a view as bytes does not allow.
        target.as_strided((target.numel(),), (1,)).view(torch.uint8).fill_(params[8])


def _operand(tensor: torch.Tensor, offset: int) -> _Operand:
    address = tensor.data_ptr()
    _stale.see(address)
    return _Operand(offset, tuple(tensor.shape), tensor.stride(), tensor.dtype, min(_ALIGNMENT, address & -address))


def _node(launch: device.Launch, op: int) -> tuple[RecordedNode, Step]:
    """The node for a launch: its parameter bytes, and how a replay reads them."""
    tensors = [leaf for leaf in launch.leaves if memory.is_emulated(leaf)]
    plain = all(t.is_contiguous() and t.numel() and not t.is_conj() and not t.is_neg() for t in tensors)
    if (
        launch.name == "aten::copy_"
        and plain
        and tensors[0].dtype == tensors[1].dtype
        and tensors[0].shape == tensors[1].shape
    ):
        target, source = tensors
        params = struct.pack("<QQ", source.data_ptr(), target.data_ptr())
        return RecordedNode("memcpy", "memcpy", op, params), _Memcpy(_operand(source, 0), _operand(target, 8))
    if launch.name == "aten::zero_" and plain:
        params = struct.pack("<QQ", tensors[0].data_ptr(), 0)
        return RecordedNode("memset", "memset", op, params), _Memset(_operand(tensors[0], 0))
    packer = _Packer(launch.name, hidden=launch.name in HIDES_POINTERS)
    fill = tensors[0].dtype if launch.name == "aten::fill_.Scalar" else None
    leaves = tuple(packer.leaf(leaf, fill) for leaf in launch.leaves)
    outputs = tuple(output if output is None else packer.tensor(output) for output in launch.outputs)
    table = packer.finish()
    step = _Kernel(
        launch.kernel, leaves, launch.spec, outputs, table, bytes(packer.pointers) if table is not None else b""
    )
    return RecordedNode("kernel", launch.name, op, bytes(packer.params)), step


# ---- recording -------------------------------------------------------------------------------------------------


class _Recorder:
    """Turns launches into nodes, and remembers what memory held before."""

    def __init__(self) -> None:
        self.nodes: list[RecordedNode] = []
        self.steps: list[Step] = []
        self.refused: RuntimeError | None = None
        self._op = -1
        self._saved: dict[tuple[int, int], bytes] = {}

    def mark(self, op: int) -> None:
        self._op = op

    def before(self, tensors: Sequence[torch.Tensor]) -> None:
        # Inputs too: some kernels write arguments that their schema does not name (statistics of batch norm).
        for tensor in tensors:
            address = tensor.data_ptr()
            nbytes = memory.span_bytes(tensor.shape, tensor.stride(), tensor.dtype)
            segment = memory.allocator.segment_at(address, nbytes)
            if not nbytes or segment is None or segment.owned[segment.granules(address, 1)].any():
                continue
            self._saved.setdefault((address, nbytes), ctypes.string_at(address, nbytes))

    def after(self, launch: device.Launch) -> None:
        node, step = _node(launch, self._op)
        self.nodes.append(node)
        self.steps.append(step)

    def refuse(self, op: str) -> RuntimeError:
        self.refused = RuntimeError(f"emu error: operation not permitted when stream is capturing: {op}")
        return self.refused

    def undo(self) -> None:
        """Put back what memory held that the recording did not allocate."""
        for (address, _), data in reversed(self._saved.items()):
            ctypes.memmove(address, data, len(data))


class EmulatedGraph(RecordedGraph):
    """A recorded graph of the emulated device."""

    def __init__(
        self, nodes: Sequence[RecordedNode], steps: list[Step], pool: EmulatedPool, replayed: list[int]
    ) -> None:
        self.nodes = tuple(nodes)
        self._steps: list[Step] | None = steps
        self._order = list(range(len(steps)))
        self._params = [node.params for node in nodes]
        self._updated: frozenset[int] = frozenset()
        self._table: torch.Tensor | None = None
        self._buffers: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._replayed = replayed
        self._let_go = weakref.finalize(self, memory.allocator.let_go, pool)
        self._let_go.atexit = False

    @override
    def params_address(self, node: int) -> int:
        if node not in self._buffers:
            params = self.nodes[node].params
            self._buffers[node] = (ctypes.c_char * len(params)).from_buffer_copy(params)
        return ctypes.addressof(self._buffers[node])

    @override
    def commit(self, node: int) -> None:
        self._check_held("commit")
        if node in self._updated:
            raise RuntimeError("emu error: a node that the device updates was sent without uploading the graph again")
        self.params_address(node)
        self._params[node] = self._buffers[node].raw
        device.counters.patches += 1

    @override
    def restore(self) -> None:
        self._check_held("restore")
        for node, buffer in self._buffers.items():
            buffer.raw = self.nodes[node].params
        self._params[:] = [node.params for node in self.nodes]

    @override
    def mechanisms(self, node: int, request: Mechanism = "auto") -> frozenset[NodeMechanism]:
        return emulated_wiring.mechanisms(self.nodes[node])

    @override
    def wire(self, wiring: Wiring) -> list[list[tuple[int, int]]]:
        steps = self._check_held("wire")
        self._params[:] = [node.params for node in self.nodes]  # a new executable of what was recorded
        added = emulated_wiring.add_wiring(self.nodes, self._params, steps, wiring)
        self._table, self._updated = added.table, added.updated
        places: list[list[tuple[int, int]]] = [[] for _ in range(wiring.values)]
        for nodes, front in ((added.first, True), (added.last, False)):
            for node, step in nodes:
                index = len(steps)
                steps.append(step)
                self._params.append(node.params)
                self.nodes += (node,)
                self._order.insert(0 if front else index, index)
                for value, found in enumerate(places):
                    found.append((index, 8 * value))
        return places

    @override
    def replay(self) -> None:
        steps = self._check_held("replay")
        with emulated_turns.lock:
            self._replay(steps)

    def _replay(self, steps: list[Step]) -> None:
        if device.recorder is not None:
            raise device.recorder.refuse("graph launch")
        device.counters.launches += 1
        device.counters.replays += 1
        self._replayed[0] += len(steps)
        with (
            torch._C.DisableTorchFunction(),
            torch._C._DisableTorchDispatch(),  # pyright: ignore
            torch._C._AutoDispatchBelowAutograd(),  # pyright: ignore
        ):
            self.failed = True
            for index in self._order:
                steps[index].run(self._params[index])
            self.failed = False

    @override
    def release(self, *keep: object) -> None:
        self._steps = None
        self._let_go()

    def _check_held(self, call: str) -> list[Step]:
        if self._steps is None:
            raise RuntimeError(f"{call}(): the graph has been released")
        return self._steps


# ---- the driver ------------------------------------------------------------------------------------------------


class EmulatedDriver(Driver):
    """The emulated device; `driver` makes the one there is."""

    def __init__(self) -> None:
        device.register()
        ops.register_memory_view(device.NAME, self.tensor_at)
        self.device = torch.device(device.NAME, 0)
        self.counters: Counters = device.counters
        self._replayed = [0]  # nodes that replays have run
        turns.register(self)

    def after_fork(self) -> None:
        """Free the device in a child process: what another thread was recording is not recorded there."""
        for lock in (emulated_turns.lock, memory.allocator.lock):
            lock._at_fork_reinit()  # pyright: ignore  # as CPython does for its own locks, 3.11 to 3.14
        if device.recorder is not None:
            device.set_recorder(None)
            memory.allocator.current, memory.allocator.freed = memory.allocator.default, None

    @override
    def new_pool(self) -> Pool:
        return EmulatedPool(memory.allocator)

    @override
    def record(self, body: Callable[[Callable[[int], None]], T], pool: Pool) -> tuple[RecordedGraph, T]:
        """Run ``body(mark)`` with its device work recorded; see `Driver.record`.

        Everything is executed, to know the shapes, and then undone: memory from the pool is poisoned, other memory
        and the random state are as before. Work of other threads on the device waits until the recording is over.
        """
        call = "driver.record(body, pool)"
        if not isinstance(pool, EmulatedPool):
            raise ArgumentError(
                describe(call, f"pool is a {type(pool).__name__}", expected="a pool of driver.new_pool()")
            )
        with emulated_turns.lock, no_collection():
            return self._record(call, body, pool)

    def _record(
        self, call: str, body: Callable[[Callable[[int], None]], T], pool: EmulatedPool
    ) -> tuple[RecordedGraph, T]:
        if device.recorder is not None:
            raise CaptureError(describe(call, "the device is recording already", remedy="End that recording first."))
        recorder = _Recorder()
        random_state = self.random_state()
        self._begin(recorder, pool)
        try:
            result = body(recorder.mark)
        except BaseException as error:
            self._end(recorder, pool, random_state)
            memory.allocator.let_go(pool)
            if recorder.refused is None or not isinstance(error, RuntimeError):
                raise
            traceback.clear_frames(error.__traceback__)  # their tensors would live as long as the exception
            raise self._refusal(call, recorder.refused) from error
        self._end(recorder, pool, random_state)
        if recorder.refused is not None:  # the body has swallowed it; a CUDA capture would be invalid as well
            memory.allocator.let_go(pool)
            raise self._refusal(call, recorder.refused) from recorder.refused
        self.counters.captures += 1
        return EmulatedGraph(recorder.nodes, recorder.steps, pool, self._replayed), result

    def _begin(self, recorder: _Recorder, pool: EmulatedPool) -> None:
        allocator = memory.allocator
        allocator.settle()
        pool.holds += 1
        allocator.current = pool
        allocator.freed = []
        device.set_recorder(recorder)

    def _end(self, recorder: _Recorder, pool: EmulatedPool, random_state: torch.Tensor) -> None:
        allocator = memory.allocator
        device.set_recorder(None)
        allocator.current = allocator.default
        recorder.undo()
        allocator.poison_owned(pool)
        freed, allocator.freed = allocator.freed or [], None
        for address, nbytes in freed:  # what was saved before it died has just been put back there
            ctypes.memset(address, 0xFF, nbytes)
        for step in recorder.steps:
            if isinstance(step, _Kernel) and step.table is not None:
                ctypes.memmove(step.table.data_ptr(), step.table_bytes, len(step.table_bytes))
        self.set_random_state(random_state)

    def _refusal(self, call: str, refused: RuntimeError) -> CaptureError:
        remedy = "Keep operations that need data of the device on the host out of recordings."
        return CaptureError(describe(call, str(refused), remedy=remedy))

    @override
    def tensor_at(
        self, address: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            return memory.tensor_at(address, shape, stride, dtype)

    @override
    def synchronize(self) -> None:
        device.synchronize("synchronize")

    @override
    def random_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    @override
    def set_random_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    @override
    def allocated_total(self) -> int:
        return memory.allocator.total_bytes()

    @override
    def live_bytes(self) -> int:
        return memory.allocator.live_bytes()

    @override
    def costs(self) -> Costs:
        return Costs(_REPLAY_US, _PATCH_US, 12.0, 0.02, 4.0, 0.1, _COPY_US, _COPY_BYTES_PER_US)

    @override
    def replay_time(self, graph: RecordedGraph, restore: Callable[[], object] | None = None) -> float:
        replay = Run(graph.replay, restore)
        for _ in range(_MEASURED_RUNS - 1):  # after the one of the proof
            replay()
        return _NODE_US * len(graph.nodes)

    @override
    def measure(self, run: Callable[[], object]) -> float:
        run = run if isinstance(run, Run) else Run(run)
        for _ in range(_MEASURED_RUNS - 1):
            run()
        run.prepare()
        before, nodes = dataclasses.replace(self.counters), self._replayed[0]
        run.timed()
        now = self.counters
        replays = now.replays - before.replays
        return (
            _LAUNCH_US * (now.launches - before.launches - replays)
            + _REPLAY_US * replays
            + _NODE_US * (self._replayed[0] - nodes)
            + _PATCH_US * (now.patches - before.patches)
            + _COPY_US * (now.copies - before.copies)
            + (now.copied_bytes - before.copied_bytes) / _COPY_BYTES_PER_US
        )


@functools.cache
def driver() -> EmulatedDriver:
    """The driver of the emulated device; the first call makes the device known to torch."""
    return EmulatedDriver()


def register() -> None:
    """Make the device known to torch; calling it again does nothing."""
    device.register()
