//! Unsafe code is confined to the places that cannot do without it.

use super::source::{code, lines_with};
use super::{Problem, Tree};

/// Folders (with a slash at the end) and files where `unsafe` may stand, and for what.
const ALLOWED: &[(&str, &str)] = &[
    ("bindings/c/src/", "what C points to, and functions that C calls"),
    ("crates/net/", "system calls and memory that outlives a lock; its tests start drivers too"),
    ("crates/verbs/", "registered memory, which is unsafe for its caller too, and libibverbs"),
    ("crates/control/src/data_plane.rs", "the memory that a switch sends from"),
    ("crates/collective/src/memory/", "registered vectors, and slices for one call"),
    ("crates/transfer/src/buffer.rs", "registered buffers that callers own"),
    ("crates/transfer/src/gpu.rs", "copies to and from memory of GPUs"),
    ("crates/transfer/src/gpu/tests.rs", "memory of a GPU that is not there"),
    ("crates/transfer/src/memory.rs", "registered memory, and copies to and from it"),
    ("crates/transfer/src/memory/gathered.rs", "pieces of it that a system call sends or fills"),
    ("crates/transfer/tests/cuda/", "memory of a GPU that a caller brings, and takes away"),
    ("crates/transfer/tests/registration.rs", "memory that a caller brings"),
    ("crates/transfer/tests/unmapped.rs", "memory that a caller brings, and takes away"),
    ("crates/transfer/tests/shm.rs", "memory that a caller brings, and other processes write"),
    ("bindings/python/src/engine.rs", "memory that objects of Python have"),
    ("bindings/python/src/mooncake/bounce.rs", "copies to and from addresses that callers name"),
    ("bindings/python/src/mooncake/started.rs", "memory that callers register by its address"),
    ("bindings/python/src/region.rs", "views of memory for Python, and what a fork does not have"),
    ("crates/cli/src/process.rs", "signals"),
    ("crates/cli/src/top/terminal.rs", "the modes and the size of a terminal"),
    ("crates/cli/src/closed.rs", "a look at stdin and stdout before Rust's runtime opens them"),
    ("crates/cli/src/bench/rdma/host.rs", "registered memory of a measurement"),
    ("crates/cli/src/bench/sweep/odd.rs", "vectors that begin at any byte"),
    ("crates/cli/src/rdma/memory.rs", "registered memory that is copied to and from"),
    ("crates/collective/src/communicator.rs", "vectors that a switch writes to during a call"),
    ("crates/collective/src/raw.rs", "memory that callers name by address"),
    ("crates/collective/src/registrations.rs", "memory that callers register by address"),
    ("crates/collective/examples/plain_host/", "registered memory of a host"),
    ("crates/collective/tests/hosts.rs", "memory that a caller names by address"),
    ("crates/collective/tests/raw.rs", "memory that a caller names by address"),
    ("crates/collective/tests/trees.rs", "memory that a caller names by address"),
    ("crates/wire/tests/allocation.rs", "an allocator that counts"),
    ("crates/roce/tests/allocation.rs", "an allocator that counts"),
    ("crates/roce/tests/flood.rs", "an allocator that counts"),
    ("crates/inc/tests/growth.rs", "an allocator that counts"),
];

/// `unsafe` stands in no other file, tests included.
pub(super) fn allowed_files(tree: &Tree) -> Vec<Problem> {
    let allowed = |path: &str| {
        ALLOWED.iter().any(|(place, _)| match place.ends_with('/') {
            true => path.starts_with(place),
            false => path == *place,
        })
    };
    let mut problems = Vec::new();
    for (path, text) in tree.sources().filter(|(path, _)| !allowed(path)) {
        for line in lines_with(&code(text), "unsafe") {
            let what = "`unsafe` outside the places listed in xtask/src/tidy/unsafety.rs";
            problems.push(Problem::new(path, line, what));
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(path: &str, text: &str) -> usize {
        allowed_files(&Tree::of([(path, text)])).len()
    }

    #[test]
    fn unsafe_outside_the_list_is_found() {
        assert_eq!(check("crates/roce/src/lib.rs", "unsafe fn a() {}"), 1);
        assert_eq!(check("crates/transfer/src/engine.rs", "fn a() { unsafe { b() } }"), 1);
        assert_eq!(check("crates/control/tests/it.rs", "unsafe { b() }"), 1);
    }

    #[test]
    fn the_list_and_other_words_are_free() {
        assert_eq!(check("crates/net/src/udp/socket.rs", "unsafe { b() }"), 0);
        assert_eq!(check("crates/transfer/src/memory.rs", "unsafe { b() }"), 0);
        assert_eq!(check("crates/roce/src/lib.rs", "#![forbid(unsafe_code)] // unsafe"), 0);
    }
}
