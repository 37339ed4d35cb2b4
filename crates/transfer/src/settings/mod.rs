//! The settings of engines.

#![expect(dead_code, reason = "nothing takes settings yet")]

mod kind;
mod table;
mod values;
