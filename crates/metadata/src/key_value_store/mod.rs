//! A store on a server that keeps values by keys: `mooncake/ram/<name>` has a segment's descriptor, and
//! `mooncake/rpc_meta/<name>` says where its engine answers.

#![allow(dead_code, reason = "the store itself is still to come")]

mod extras;
mod names;
mod own;
