//! The settings of engines.

#![expect(dead_code, reason = "nothing takes settings yet")]

mod environment;
mod error;
mod kind;
mod table;
mod values;
