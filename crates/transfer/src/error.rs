//! What can go wrong. One enum for each operation; `code` gives the number that Mooncake's C API
//! has for it.

mod batch;
mod engine;
mod registration;
mod segment;
mod submit;

use millstream_metadata::{CallErrorKind, StoreError};

pub use self::batch::{BatchError, FreeError, SubmitAndWaitError, SubmitNewError, TransferError};
pub use self::engine::{InstallError, NewError};
pub use self::registration::{FileError, RegisterError};
pub use self::segment::{BufferError, SegmentError};
pub use self::submit::SubmitError;

mod code {
    pub(super) const INVALID_ARGUMENT: i32 = -1;
    pub(super) const TOO_MANY_REQUESTS: i32 = -2;
    pub(super) const ADDRESS_NOT_REGISTERED: i32 = -3;
    pub(super) const BATCH_BUSY: i32 = -4;
    pub(super) const DEVICE_NOT_FOUND: i32 = -6;
    pub(super) const ADDRESS_OVERLAPPED: i32 = -7;
    pub(super) const DNS: i32 = -101;
    pub(super) const SOCKET: i32 = -102;
    pub(super) const MALFORMED_JSON: i32 = -103;
    pub(super) const METADATA: i32 = -200;
    pub(super) const ENDPOINT: i32 = -201;
    pub(super) const CONTEXT: i32 = -202;
    pub(super) const MEMORY: i32 = -302;
}

fn store_code(error: &StoreError) -> i32 {
    match error {
        StoreError::Name(_) => code::INVALID_ARGUMENT,
        StoreError::Call(error) => match error.kind {
            CallErrorKind::Resolve(_) => code::DNS,
            CallErrorKind::Meaning(_) => code::METADATA,
            _ => code::SOCKET,
        },
        StoreError::Descriptor { .. } => code::MALFORMED_JSON,
        StoreError::BadName { .. } => code::INVALID_ARGUMENT,
        StoreError::Shared(error) => store_code(error),
        StoreError::NotFound { .. }
        | StoreError::TooLong { .. }
        | StoreError::Server(_)
        | StoreError::Taken { .. } => code::METADATA,
    }
}
