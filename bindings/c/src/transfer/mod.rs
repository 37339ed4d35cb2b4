//! The C API of the original transfer engine, whose header is `transfer_engine_c.h`, and what ours adds to it.

mod batch;
mod borrowed;
mod engine;
mod files;
mod install;
mod layout;
mod lifetime;
mod memory;
mod notifications;
mod reports;
mod segments;
mod shutdown;
mod submission;
