//! Collectives from the command line.

mod number;
mod work;
