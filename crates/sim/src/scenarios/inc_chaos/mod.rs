//! In-network collectives under everything at once: hosts and switches, trees of one to six levels, several
//! communicators, all collectives, types and operations in both modes, over links that lose, double,
//! reorder and corrupt packets. Machines stand still, are cut off and die, ranks disagree or break the
//! protocol, and an outsider forges packets.
//!
//! Every result is compared with a reference that is computed in another way (the module `reference`), all
//! memory around it and after the call too. Where nothing happened that a communicator need not survive, every
//! call has to succeed on every rank; where something did, every rank has to hear of it.

#![expect(dead_code, reason = "the run itself is still to come")]

mod build;
mod call;
mod director;
mod machine;
mod outsider;
mod reference;
mod tree;
mod world;
