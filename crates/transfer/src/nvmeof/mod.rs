//! The transport `nvmeof`: segments that are files.

mod disk;
mod target;
mod protocol;
