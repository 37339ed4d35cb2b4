//! `doctor`: what of this machine or container stands in the way, and the line that changes it.

#![expect(dead_code, reason = "the checks are to come")]

mod check;
mod facts;
