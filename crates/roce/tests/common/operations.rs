//! Operations on one address of the peer's memory.

use millstream_roce::SendOperation;

/// The address.
pub(crate) const REMOTE: u64 = 0x2000_0000_0000;

pub(crate) const SEND: SendOperation = SendOperation::Send { immediate: None };

pub(crate) fn write(remote_key: u32) -> SendOperation {
    SendOperation::Write { remote_address: REMOTE, remote_key, immediate: None }
}

pub(crate) fn read(remote_key: u32) -> SendOperation {
    SendOperation::Read { remote_address: REMOTE, remote_key }
}

pub(crate) fn fetch_add(remote_key: u32) -> SendOperation {
    SendOperation::FetchAdd { remote_address: REMOTE, remote_key, add: 1 }
}
