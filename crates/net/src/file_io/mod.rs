//! Reads and writes of files that do not hold up whoever asks for them.

mod buffer;

pub use buffer::{ALIGNMENT, AlignedBuffer};
