//! INCCL: the C API of in-network collectives, whose header is `inccl.h`.

mod codes;
mod collectives;
mod communicator;
mod group;
mod settings;
mod started;
