//! The settings of engines.

#![expect(dead_code, reason = "nothing takes settings yet")]

mod environment;
mod error;
mod file;
mod kind;
mod table;
mod values;

use self::error::SettingsError;
