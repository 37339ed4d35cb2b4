//! Models of how threads share the progress of a node.

mod progress;
mod sending;
mod timer;
