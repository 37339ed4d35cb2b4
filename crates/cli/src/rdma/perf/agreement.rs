//! Both sides run the same test, or neither does.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// What a side is about to do: the first line that it sends.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Description {
    /// Such as `write-bw`.
    pub(super) test: String,
    /// Bytes of a message: the first of several sizes.
    pub(super) size: u32,
    /// Sizes from `size` on, each twice the one before.
    pub(super) sizes: u32,
    /// Messages of each queue pair and size, unless it runs for a time.
    pub(super) iterations: Option<u64>,
    /// How long, for each size.
    pub(super) duration_ms: Option<u64>,
    /// Whether the bytes are checked in the end.
    pub(super) verify: bool,
    /// The largest path MTU that the way to the other side takes, or the one asked for.
    pub(super) mtu: usize,
    /// READs and atomic operations that this side takes at a time.
    pub(super) reads: u8,
    /// Whether this side gives signs of life while it measures what the other one's processor does not see. Older ones do not.
    #[serde(default)]
    pub(super) signs: bool,
    pub(super) queue_pairs: Vec<Address>,
}

/// One queue pair, and the memory that belongs to it.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(super) struct Address {
    pub(super) qpn: u32,
    pub(super) psn: u32,
    /// The key of the memory that the other side may reach; 0 when there is none.
    pub(super) key: u32,
    /// Its virtual address.
    pub(super) address: u64,
}

/// The two sides are about to do different things.
#[derive(Debug, Error)]
#[error("the {peer} runs something else ({differences}): start both with the same options")]
pub(super) struct Disagreement {
    peer: &'static str,
    differences: String,
}

/// Fails unless both do the same; says what differs.
pub(super) fn compare(
    ours: &Description,
    theirs: &Description,
    peer: &'static str,
) -> Result<(), Disagreement> {
    let mut differences = Vec::new();
    let mut check = |option: &str, ours: String, theirs: String| {
        if ours != theirs {
            differences.push(format!("{option} is {ours} here, {theirs} there"));
        }
    };
    // What a peer says is shown on a terminal.
    let test = theirs.test.escape_debug().to_string();
    check("the test", ours.test.clone(), test);
    let size = |it: &Description| match it.sizes {
        1 => it.size.to_string(),
        _ => "--all".to_owned(),
    };
    check("--size", size(ours), size(theirs));
    let amount = |it: &Description| match (it.iterations, it.duration_ms) {
        (Some(iterations), _) => format!("--iters {iterations}"),
        (None, Some(milliseconds)) => format!("--duration {milliseconds}ms"),
        (None, None) => "nothing".to_owned(),
    };
    check("the length", amount(ours), amount(theirs));
    let count = |it: &Description| it.queue_pairs.len().to_string();
    check("--qps", count(ours), count(theirs));
    let verify = |it: &Description| if it.verify { "unset" } else { "set" }.to_owned();
    check("--no-verify", verify(ours), verify(theirs));
    if differences.is_empty() {
        return Ok(());
    }
    Err(Disagreement { peer, differences: differences.join("; ") })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn description() -> Description {
        let address = Address { qpn: 1, psn: 2, key: 3, address: 4 };
        Description {
            test: "write-bw".to_owned(),
            size: 65536,
            sizes: 1,
            iterations: Some(5000),
            duration_ms: None,
            verify: true,
            mtu: 1024,
            reads: 16,
            signs: true,
            queue_pairs: vec![address],
        }
    }

    #[test]
    fn what_may_differ_may() {
        let address = Address { qpn: 9, psn: 8, key: 7, address: 6 };
        let theirs = Description {
            mtu: 4096,
            reads: 1,
            signs: false,
            queue_pairs: vec![address],
            ..description()
        };
        compare(&description(), &theirs, "client").unwrap();
        // An older one has not heard of signs of life.
        let mut older = serde_json::to_value(&theirs).unwrap();
        assert_eq!(older.as_object_mut().unwrap().remove("signs"), Some(false.into()));
        let older: Description = serde_json::from_value(older).unwrap();
        assert!(!older.signs);
    }

    #[test]
    fn what_differs_is_named_with_both_values() {
        type Change = fn(&mut Description);
        let cases: [(Change, &str); 7] = [
            (|it| it.test = "read-bw".to_owned(), "the test is write-bw here, read-bw there"),
            (|it| it.size = 4096, "--size is 65536 here, 4096 there"),
            (|it| (it.size, it.sizes) = (2, 23), "--size is 65536 here, --all there"),
            (|it| it.iterations = Some(1), "the length is --iters 5000 here, --iters 1 there"),
            (
                |it| (it.iterations, it.duration_ms) = (None, Some(2500)),
                "the length is --iters 5000 here, --duration 2500ms there",
            ),
            (|it| it.queue_pairs.clear(), "--qps is 1 here, 0 there"),
            (|it| it.verify = false, "--no-verify is unset here, set there"),
        ];
        for (change, expected) in cases {
            let mut theirs = description();
            change(&mut theirs);
            let error = compare(&description(), &theirs, "client").unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
            assert!(error.contains("the client"), "{error}");
        }
    }
}
