//! Replays the fuzzers' committed corpus with the functions that the fuzz targets call. See
//! `fuzz/README.md` for what the file names mean.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use millstream_wire::fuzz;

/// A fuzz target.
struct Target {
    name: &'static str,
    run: fn(&[u8]) -> bool,
    /// The least number of `ok-` seeds, so that an empty corpus cannot pass.
    least_ok: usize,
    /// The least number of `bad-` seeds.
    least_bad: usize,
}

const TARGETS: [Target; 4] = [
    Target { name: "frame", run: fuzz::frame, least_ok: 10, least_bad: 20 },
    Target { name: "headers", run: fuzz::headers, least_ok: 8, least_bad: 2 },
    Target { name: "icrc", run: fuzz::icrc, least_ok: 6, least_bad: 3 },
    Target { name: "packet", run: fuzz::packet, least_ok: 30, least_bad: 10 },
];

fn fuzz_directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz")
}

/// What a directory holds, in the order of the names.
fn entries(directory: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> = std::fs::read_dir(directory)
        .unwrap_or_else(|error| panic!("{}: {error}", directory.display()))
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.sort();
    paths
}

#[test]
fn the_corpus_does_what_its_names_say() {
    for Target { name: target, run, least_ok, least_bad } in TARGETS {
        let (mut ok, mut bad) = (0, 0);
        for path in entries(&fuzz_directory().join("corpus").join(target)) {
            let well_formed = run(&std::fs::read(&path).unwrap());
            let name = path.file_name().unwrap().to_str().unwrap();
            if name.starts_with("ok-") {
                assert!(well_formed, "{target}/{name} is refused");
                ok += 1;
            } else if name.starts_with("bad-") {
                assert!(!well_formed, "{target}/{name} is accepted");
                bad += 1;
            }
        }
        assert!(ok >= least_ok && bad >= least_bad, "{target}: {ok} ok and {bad} bad seeds");
    }
}

/// A target without a corpus, or a corpus without a target, would be replayed by nobody.
#[test]
fn every_target_is_replayed() {
    let stems = |directory: &str| -> BTreeSet<String> {
        entries(&fuzz_directory().join(directory))
            .iter()
            .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
            .collect()
    };
    let replayed: BTreeSet<_> = TARGETS.iter().map(|target| target.name.to_owned()).collect();
    assert_eq!(stems("fuzz_targets"), replayed);
    assert_eq!(stems("corpus"), replayed);
}
