//! The transport `nvmeof`: segments that are files.

mod protocol;
