"""What ``mooncake.engine`` has, done by Millstream."""

from millstream._native import TransferEngine, TransferNotify, TransferOpcode

__all__ = [
    "CoroRPCInterface",
    "InnerTransferEngine",
    "Read",
    "ReceivedData",
    "ReceivedTensor",
    "RpcInterface",
    "SUPPORT_CUDA",
    "SUPPORT_EFA",
    "SUPPORT_HIP",
    "SUPPORT_INTRA_NVLINK",
    "SUPPORT_MNNVL",
    "SUPPORT_MUSA",
    "SharedSegment",
    "TransferEngine",
    "TransferNotify",
    "TransferOpcode",
    "Write",
    "create_rpc_client",
    "create_rpc_server",
]

Read = TransferOpcode.Read
Write = TransferOpcode.Write

SUPPORT_CUDA = False
SUPPORT_EFA = False
SUPPORT_HIP = False
SUPPORT_INTRA_NVLINK = False
SUPPORT_MNNVL = False
SUPPORT_MUSA = False


def _refuse(name, remedy):
    raise NotImplementedError(f"{name} is not in Millstream; {remedy}")


class _Missing:
    _remedy = ""

    def __init__(self, *arguments, **values):
        _refuse(type(self).__name__, self._remedy)


class InnerTransferEngine(_Missing):
    """Not there."""

    _remedy = "use TransferEngine"


class SharedSegment(_Missing):
    """Not there."""

    _remedy = "use millstream.Engine.allocate, whose memory other processes of this host map"

    @staticmethod
    def supported(*arguments, **values):
        return False

    @classmethod
    def create(cls, *arguments, **values):
        return cls()


class RpcInterface(_Missing):
    """Not there."""

    _remedy = "use another library for calls between processes"


class ReceivedData(RpcInterface):
    """Not there."""


class ReceivedTensor(RpcInterface):
    """Not there."""


CoroRPCInterface = RpcInterface


def create_rpc_client(*arguments, **values):
    """Not there."""
    _refuse("create_rpc_client", RpcInterface._remedy)


def create_rpc_server(*arguments, **values):
    """Not there."""
    _refuse("create_rpc_server", RpcInterface._remedy)
