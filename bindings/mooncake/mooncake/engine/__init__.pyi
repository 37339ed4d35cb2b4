"""The contract of the original: 0 or a negative code in place of exceptions, addresses in place of objects."""

from collections.abc import Iterable
from typing import Any, NoReturn

class TransferOpcode:
    """Which way bytes go."""

    Read: TransferOpcode
    Write: TransferOpcode
    __members__: dict[str, TransferOpcode]
    def __init__(self, value: int) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...

Read: TransferOpcode
Write: TransferOpcode

class TransferNotify:
    """A message to the application of a target."""

    name: str
    msg: str
    def __init__(self, name: str = ..., msg: str = ...) -> None: ...

class TransferEngine:
    """Moves bytes between registered memory here and at peers."""

    TransferOpcode: type[TransferOpcode]
    def __init__(self) -> None: ...
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
        opcode: TransferOpcode,
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
        opcode: TransferOpcode,
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
        opcode: TransferOpcode,
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

SUPPORT_CUDA: bool
SUPPORT_EFA: bool
SUPPORT_HIP: bool
SUPPORT_INTRA_NVLINK: bool
SUPPORT_MNNVL: bool
SUPPORT_MUSA: bool

class InnerTransferEngine:
    """Raises NotImplementedError."""

class SharedSegment:
    """Raises NotImplementedError."""

class RpcInterface:
    """Raises NotImplementedError."""

CoroRPCInterface = RpcInterface

class ReceivedData:
    """Raises NotImplementedError."""

class ReceivedTensor:
    """Raises NotImplementedError."""

def create_rpc_client(*arguments: Any, **values: Any) -> NoReturn: ...
def create_rpc_server(*arguments: Any, **values: Any) -> NoReturn: ...
