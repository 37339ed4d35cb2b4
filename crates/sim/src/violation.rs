//! What a checker objects to.

use core::fmt;

use millstream_roce::Instant;

/// An invariant that does not hold.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Violation {
    /// When it was seen.
    pub at: Instant,
    /// What is wrong.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at {} s: {}", self.at, self.what)
    }
}
