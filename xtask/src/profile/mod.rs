//! Where processor time goes, by `perf`.

mod owners;
mod samples;
