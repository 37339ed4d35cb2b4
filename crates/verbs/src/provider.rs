//! What a device is made of, and the choice between the two at every call.

use std::fmt;

/// What does the work behind a device.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Provider {
    /// This crate's own RoCEv2 endpoint over the system's sockets.
    Soft,
    /// The system's RDMA devices by libibverbs.
    Ibverbs,
}

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Soft => "soft",
            Self::Ibverbs => "ibverbs",
        })
    }
}

/// An object of one provider or the other. A branch that always goes the same way costs the data
/// path less than a virtual call, and lets each provider's code be inlined.
#[derive(Clone, Debug)]
pub(crate) enum Provided<S, I> {
    Soft(S),
    Ibverbs(I),
}

/// `either!(object, it => expression)`: the same expression for both providers' objects.
macro_rules! either {
    ($provided:expr, $object:ident => $expression:expr) => {
        match $provided {
            $crate::provider::Provided::Soft($object) => $expression,
            $crate::provider::Provided::Ibverbs($object) => $expression,
        }
    };
}

pub(crate) use either;
