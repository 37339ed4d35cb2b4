"""The contract of the original: 0 or a negative code in place of exceptions, addresses in place of objects."""

from typing import Any, NoReturn

from millstream._native import TransferEngine as TransferEngine
from millstream._native import TransferNotify as TransferNotify
from millstream._native import TransferOpcode as TransferOpcode

Read: TransferOpcode
Write: TransferOpcode

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
