//! Peers that die, refuse, are silent, lie, or come back as someone else.

#[path = "../common/mod.rs"]
mod common;

mod fixture;
mod gone;
mod handshakes;
mod nics;
mod room;
mod silence;
