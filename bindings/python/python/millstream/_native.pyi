"""The native part. Import from ``millstream``."""

from collections.abc import Generator, Iterable, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Literal, NoReturn, final

from typing_extensions import Buffer

@final
class Wakeup:
    """How an event loop hears of transfers that are over."""

    def __new__(cls) -> Wakeup: ...
    def fileno(self) -> int: ...
    def take(self) -> list[int]: ...

@final
class Range:
    """Bytes of memory: where, and how many. Slices of it are ranges."""

    def __new__(cls, address: int, length: int) -> Range: ...
    @property
    def address(self) -> int:
        """The address of the first byte, in its process."""
    @property
    def length(self) -> int:
        """Bytes."""
    def __len__(self) -> int: ...
    def __getitem__(self, key: slice, /) -> Range: ...

@final
class Region:
    """Registered memory. Slices of it are ranges.

    One that the engine allocated has the buffer protocol: ``numpy.frombuffer(region, dtype)`` is an array there.
    """

    @property
    def address(self) -> int:
        """The address of its first byte."""
    @property
    def length(self) -> int:
        """Bytes."""
    def unregister(self) -> None:
        """Waits until no transfer touches it any more, and lets go of what was registered.

        Raises :class:`RegisterError` if that was done before, though the same memory may be registered anew.
        """
    def read(self, offset: int = 0, length: int | None = None) -> bytes:
        """Copies bytes out of memory that the engine allocated."""
    def write(self, offset: int, data: bytes) -> None:
        """Copies bytes into memory that the engine allocated."""
    def __len__(self) -> int: ...
    def __getitem__(self, key: slice, /) -> Range: ...
    def __buffer__(self, flags: int) -> memoryview: ...
    def __enter__(self) -> Region: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

@final
class Segment:
    """The registered memory of a peer."""

    @property
    def name(self) -> str:
        """The name by which it was opened."""
    @property
    def buffers(self) -> list[Range]:
        """What its process has registered for others, as it was when it was opened or refreshed.

        One that makes no sense is among them, and a request to it says what is wrong with it.
        """
    @property
    def locations(self) -> list[str]:
        """Where the memory of each of its buffers is, as ``cpu:0``."""
    def paths(self) -> list[tuple[str, bool, str | None]]:
        """Transports in the order in which they are tried: name, whether it is chosen, why it is not."""
    def refresh(self) -> None:
        """Asks its process again what it has."""
    def close(self) -> None:
        """Closes it. Transfers under way go on."""

@final
class Status:
    """How a request stands."""

    @property
    def state(self) -> str:
        """``WAITING``, ``PENDING``, ``INVALID``, ``CANCELED``, ``COMPLETED``, ``TIMEOUT`` or ``FAILED``."""
    @property
    def transferred_bytes(self) -> int:
        """At least so many bytes have arrived."""
    @property
    def transport(self) -> str | None:
        """What moves them."""
    @property
    def target_undefined(self) -> bool:
        """Whether what a WRITE that failed leaves at its target is not known."""
    @property
    def error(self) -> str | None:
        """Why it failed."""

@final
class Transfer:
    """Requests under way. ``await`` it, or wait for it."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits until all is over, for so many seconds at most; the bytes moved.

        Raises :class:`TransferError` if a request failed, and :class:`TransferTimeoutError` if it is not over
        then: it goes on.
        """
    def result(self) -> int:
        """The bytes moved, of what is over."""
    def done(self) -> bool:
        """Whether all is over, for good or bad."""
    def cancel(self) -> bool:
        """Ends what is not over; whether there was something. Wait for it before memory is used again."""
    @property
    def status(self) -> list[Status]:
        """How each request stands."""
    def _tell(self, wakeup: Wakeup, number: int) -> bool: ...
    def __len__(self) -> int: ...
    def __await__(self) -> Generator[Any, None, int]: ...

@final
class Batch:
    """Requests that are submitted together."""

    def write(
        self,
        segment: Segment,
        source: Region | Range | int,
        target: Range | int,
        length: int | None = None,
    ) -> None:
        """Adds a WRITE: bytes from here to the segment.

        ``length`` says how many, where both are addresses alone, or ranges that are not as long as each other.
        """
    def read(
        self,
        segment: Segment,
        destination: Region | Range | int,
        source: Range | int,
        length: int | None = None,
    ) -> None:
        """Adds a READ: bytes from the segment to here, as many as :meth:`write` says."""
    def write_many(
        self,
        segment: Segment,
        sources: Buffer | Sequence[int],
        targets: Buffer | Sequence[int],
        lengths: Buffer | Sequence[int] | int,
    ) -> None:
        """Adds a WRITE from each address here to one in the segment: arrays of 64-bit integers, or sequences.

        ``lengths`` is one for all, or as many as there are addresses.
        """
    def read_many(
        self,
        segment: Segment,
        destinations: Buffer | Sequence[int],
        sources: Buffer | Sequence[int],
        lengths: Buffer | Sequence[int] | int,
    ) -> None:
        """Adds a READ to each address here from one in the segment, as :meth:`write_many`."""
    def submit(
        self,
        notify: tuple[str, str] | None = None,
        timeout: float | None = None,
        *,
        priority: Literal["latency", "normal", "bulk"] | None = None,
        transport: str | None = None,
        policy: str | None = None,
        intent: str | None = None,
        durable: bool = False,
    ) -> Transfer:
        """Begins to do what was added, all or nothing, and is empty then. What is refused stays, and can be submitted again.

        ``notify`` is a name and a text that the peers' applications are told once all is done. What is not done
        after ``timeout`` seconds ends. ``priority`` counts where the policy TENT chooses, only ``transport`` does it
        if one is named, and ``policy`` is their class of the policy file (setting ``transfer.policy_file``). By ``intent``, what they
        are for, rules of that file choose transports. If ``durable``, WRITEs are done only once their bytes survive a loss of
        power there, as those of files can: memory is refused.
        """
    def __len__(self) -> int: ...

@final
class Engine:
    """A transfer engine: registers memory, and moves bytes between that and the memory of peers."""

    def __new__(
        cls,
        listen: str = "127.0.0.1",
        *,
        host: str | None = None,
        metadata: str | None = None,
        name: str | None = None,
        transports: Iterable[str] | None = None,
        bind: Iterable[str] | None = None,
        settings: dict[str, object] | None = None,
    ) -> Engine:
        """Starts an engine that answers peers at ``listen``, an IP address with a port or without.

        ``host`` is how peers reach it, if not by that address. ``metadata`` is the URI of a metadata server, by
        which it is found by its ``name``; without, its name is its host and port. ``transports`` are ``auto`` (all
        that this machine has to memory, and ``nvmeof`` once a file is registered or opened), or of ``shm``, ``tcp``, ``rdma``,
        ``rdma:soft``, ``rdma:ibverbs``, ``local``, and ``nvmeof``, by which files are offered, and segments that are
        files are reached.
        ``bind`` are the addresses of RDMA devices; without, ``auto`` has all of the system that work, unless it
        listens on loopback. ``settings`` come before those of the environment and of files.
        """
    @property
    def name(self) -> str:
        """The name of its segment, by which peers open it."""
    @property
    def address(self) -> tuple[str, int]:
        """Where it answers peers."""
    @property
    def transports(self) -> list[str]:
        """The transports that it has, in the order in which they are tried."""
    @property
    def closed(self) -> bool:
        """Whether it was closed."""
    def close(self) -> None:
        """Ends it: what is under way fails, memory and files are unregistered and let go of.

        It waits for calls of other threads, 10 seconds at the most. When it returns, nobody answers peers any more, unless a
        call takes longer: the engine ends with that then.
        """
    def __enter__(self) -> Engine: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    def register(self, buffer: Buffer | object, *, location: str = "*", remote: bool = True) -> Region:
        """Registers the memory of an object, which is kept until that is undone.

        The object has the buffer protocol (a bytearray, a numpy array), an array interface, or ``data_ptr()`` as
        tensors of torch do. Its memory is writable and in one piece. Peers see it unless ``remote`` is false.
        """
    def register_address(
        self, address: int, length: int, *, location: str = "*", remote: bool = True
    ) -> Region:
        """Registers memory by its address. The caller sees to it that it stays there."""
    def allocate(self, length: int, *, location: str = "*", remote: bool = True) -> Region:
        """Allocates and registers memory, which other processes of this host can map."""
    def register_file(
        self,
        path: str | PathLike[str],
        *,
        name: str | None = None,
        length: int | None = None,
        writable: bool = False,
        local_path_map: dict[str, str | PathLike[str]] | None = None,
    ) -> str:
        """Offers a file or a block device, as a segment of its own; the segment's name, by which peers open it.

        Offsets in the file take the place of addresses there. Whoever can open the segment can read the file, and write it if
        it is ``writable``. It stays open until it is unregistered. ``name`` is what it is called in the segment's name:
        as on disk, unless said. ``length`` is how much of it is offered: all; a regular file that is writable and
        shorter becomes so long. ``local_path_map`` says at which paths other servers have it, by their names, which
        open it there themselves if their settings ``nvmeof.mapped_folders`` let them.
        """
    def unregister_file(self, name: str) -> None:
        """Takes back the file that is this segment, once nobody reads or writes it any more."""
    @property
    def files(self) -> list[str]:
        """The names of the segments that are its files."""
    def open(self, name: str) -> Segment:
        """Opens the segment of this name."""
    def write(
        self,
        segment: Segment,
        source: Region | Range | int,
        target: Range | int,
        length: int | None = None,
        *,
        notify: tuple[str, str] | None = None,
        timeout: float | None = None,
        priority: Literal["latency", "normal", "bulk"] | None = None,
        transport: str | None = None,
        policy: str | None = None,
        intent: str | None = None,
        durable: bool = False,
    ) -> Transfer:
        """Begins a WRITE: bytes from here to the segment, as many as :meth:`Batch.write` says, on terms as those of :meth:`Batch.submit`."""
    def read(
        self,
        segment: Segment,
        destination: Region | Range | int,
        source: Range | int,
        length: int | None = None,
        *,
        notify: tuple[str, str] | None = None,
        timeout: float | None = None,
        priority: Literal["latency", "normal", "bulk"] | None = None,
        transport: str | None = None,
        policy: str | None = None,
        intent: str | None = None,
    ) -> Transfer:
        """Begins a READ: bytes from the segment to here, as many as :meth:`Batch.write` says, on terms as those of :meth:`Batch.submit`."""
    def batch(self) -> Batch:
        """Requests that are to be submitted together."""
    def notify(self, segment: Segment, name: str, text: str) -> None:
        """Sends a message to the application of a segment's process."""
    def take_notifications(self) -> list[tuple[str, str]]:
        """The messages that have come: names and texts."""
    def probe(self, name: str) -> float:
        """Asks whether the process of a segment is there; how many seconds the answer took."""

# What ``mooncake.engine`` shows: codes in place of exceptions, addresses in place of objects.

@final
class TransferOpcode:
    """Which way bytes go."""

    Read: TransferOpcode
    Write: TransferOpcode
    __members__: dict[str, TransferOpcode]
    def __new__(cls, value: int) -> TransferOpcode: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...

_Opcode = TransferOpcode

@final
class TransferNotify:
    """A message to the application of a target."""

    name: str
    msg: str
    def __new__(cls, name: str = ..., msg: str = ...) -> TransferNotify: ...

class TransferEngine:
    """Moves bytes between registered memory here and at peers."""

    TransferOpcode: type[_Opcode]
    def __new__(cls) -> TransferEngine: ...
    def initialize(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str, /
    ) -> int:
        """Starts it: 0 or -1. ``metadata_server`` is ``P2PHANDSHAKE`` or a URI."""
    def initialize_ext(
        self,
        local_hostname: str,
        metadata_server: str,
        protocol: str,
        device_name: str,
        metadata_type: str,
        /,
    ) -> int:
        """As ``initialize``, with the kind of the metadata server beside its address."""
    def get_rpc_port(self) -> int:
        """The port at which it answers peers."""
    def allocate_managed_buffer(self, length: int, /) -> int:
        """Allocates registered memory: its address, or 0."""
    def free_managed_buffer(self, buffer_addr: int, length: int, /) -> int:
        """Frees it."""
    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """0; -1: no memory; -7: some of it is registered."""
    def unregister_memory(self, buffer_addr: int, /) -> int:
        """0; -3: it was not registered."""
    def batch_register_memory(
        self, buffer_addresses: Iterable[int], capacities: Iterable[int], location: str = "*"
    ) -> int:
        """Registers all or none."""
    def batch_unregister_memory(self, buffer_addresses: Iterable[int], /) -> int:
        """Unregisters what can be: the first code that is not 0."""
    def transfer_sync_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Bytes from here to the target: 0 or -1."""
    def transfer_sync_read(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Bytes from the target to here: 0 or -1."""
    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: _Opcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Either way, with a message once it is done."""
    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Iterable[int],
        peer_buffer_addresses: Iterable[int],
        lengths: Iterable[int],
        transport_hint: str = "",
    ) -> int:
        """Several at once: 0 if all are done, else -1."""
    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Iterable[int],
        peer_buffer_addresses: Iterable[int],
        lengths: Iterable[int],
        transport_hint: str = "",
    ) -> int:
        """Several at once: 0 if all are done, else -1."""
    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Iterable[int],
        peer_buffer_addresses: Iterable[int],
        lengths: Iterable[int],
        opcode: _Opcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Several at once, either way, with a message once all are done."""
    def transfer_submit_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Begins a WRITE: the number of the batch, or 0."""
    def transfer_check_status(self, batch_id: int, /) -> int:
        """1: done, 0: under way, -1: failed, -2: not in time. What is over is free then."""
    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: Iterable[int],
        peer_buffer_addresses: Iterable[int],
        lengths: Iterable[int],
        transport_hint: str = "",
    ) -> int:
        """Begins several: the number of the batch, or 0."""
    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: Iterable[int],
        peer_buffer_addresses: Iterable[int],
        lengths: Iterable[int],
        transport_hint: str = "",
    ) -> int:
        """Begins several: the number of the batch, or 0."""
    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Iterable[int],
        peer_buffer_addresses: Iterable[int],
        lengths: Iterable[int],
        opcode: _Opcode,
        transport_hint: str = "",
    ) -> int:
        """Begins several, either way: the number of the batch, or 0."""
    def get_batch_transfer_status(self, batch_ids: Iterable[int], /) -> int:
        """Waits for all of these batches, which are free then: 0 if all are done, else -1."""
    def write_bytes_to_buffer(self, dest_address: int, src_ptr: bytes | bytearray | str, length: int, /) -> int:
        """Copies bytes to an address."""
    def read_bytes_from_buffer(self, source_address: int, length: int, /) -> bytes:
        """The bytes at an address."""
    def get_local_topology(self, device_name: str | None = None) -> str:
        """Which NICs are near to which memory, as JSON."""
    def get_first_buffer_address(self, segment_name: str, /) -> int:
        """Where the first registered memory of a segment is, or 0."""
    def get_notifies(self) -> list[TransferNotify]:
        """The messages that have come."""
    def send_probe(self, peer_server_name: str) -> int:
        """Whether the process of a segment is there: 0, or a code."""
    def warmup_efa_segment(self, segment_name: str) -> int:
        """Nothing to do: 0."""
    def get_engine(self) -> NoReturn:
        """Raises NotImplementedError."""
    def get_engine_ptr(self) -> NoReturn:
        """Raises NotImplementedError."""
    def transfer_write_on_cuda(self, *_arguments: Any, **_values: Any) -> NoReturn:
        """Raises NotImplementedError."""
    def transfer_read_on_cuda(self, *_arguments: Any, **_values: Any) -> NoReturn:
        """Raises NotImplementedError."""
    def batch_transfer_write_on_cuda(self, *_arguments: Any, **_values: Any) -> NoReturn:
        """Raises NotImplementedError."""
    def batch_transfer_read_on_cuda(self, *_arguments: Any, **_values: Any) -> NoReturn:
        """Raises NotImplementedError."""
