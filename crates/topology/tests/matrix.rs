//! The priority matrix as JSON: what is read, what is written, and what is refused.

use std::fs;
use std::path::PathBuf;

use millstream_topology::{DeviceFilter, Priorities, PriorityMatrix};
use proptest::collection::vec;
use proptest::prelude::*;

fn priorities(preferred: &[&str], available: &[&str]) -> Priorities {
    let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
    Priorities { preferred: names(preferred), available: names(available) }
}

#[test]
fn the_known_form_is_read_and_written() {
    let text = r#" { "cuda:0" : [ ["mlx5_1"], ["mlx5_0"] ],
                     "cpu:10": [[], []],
                     "cpu:2": [["mlx5_0", "mlx5_1"], []] } "#;
    let matrix = PriorityMatrix::parse(text).unwrap();
    assert_eq!(matrix.get("cuda:0"), Some(&priorities(&["mlx5_1"], &["mlx5_0"])));
    assert_eq!(matrix.get("cpu:10"), Some(&Priorities::default()));
    assert_eq!(matrix.get("cpu:1"), None);
    assert_eq!(
        matrix.to_json(),
        r#"{"cpu:2":[["mlx5_0","mlx5_1"],[]],"cpu:10":[[],[]],"cuda:0":[["mlx5_1"],["mlx5_0"]]}"#
    );
    assert_eq!(PriorityMatrix::parse("{}").unwrap(), PriorityMatrix::default());
}

#[test]
fn what_is_no_matrix_is_refused_with_the_reason() {
    let many = |count: usize, item: &dyn Fn(usize) -> String| {
        (0..count).map(item).collect::<Vec<_>>().join(",")
    };
    let locations = format!("{{{}}}", many(3000, &|number| format!(r#""cpu:{number}":[[],[]]"#)));
    let nics = format!(r#"{{"cpu:0":[[{}],[]]}}"#, many(2000, &|number| format!(r#""n{number}""#)));
    let long_name = format!(r#"{{"cpu:0":[["{}"],[]]}}"#, "n".repeat(256));
    let deep = format!(r#"{{"cpu:0":{}"#, "[".repeat(100_000));
    for (text, reason) in [
        ("", "EOF"),
        ("null", "an object of locations"),
        ("[]", "an object of locations"),
        ("{} {}", "trailing characters"),
        (r#"{"cpu:0": []}"#, "invalid length 0, expected an array of two lists"),
        (r#"{"cpu:0": [[]]}"#, "invalid length 1, expected an array of two lists"),
        (r#"{"cpu:0": [[], [], []]}"#, "invalid length 3, expected an array of two lists"),
        (r#"{"cpu:0": ["mlx5_0", "mlx5_1"]}"#, "a list of names of NICs"),
        (r#"{"cpu:0": [[7], []]}"#, "a name of 1 to 255 bytes"),
        (r#"{"cpu:0": [[""], []]}"#, "a name of 1 to 255 bytes"),
        (r#"{"": [[], []]}"#, "a name of 1 to 255 bytes"),
        (r#"{"cpu:0": [[], []], "cpu:0": [[], []]}"#, r#"location "cpu:0" is there twice"#),
        (r#"{"cpu:0": [[], []]"#, "line 1 column 18"),
        (&locations, "more than 2048 locations"),
        (&nics, "more than 1024 NICs"),
        (&long_name, "invalid length 256"),
        (&deep, "a name of 1 to 255 bytes"),
        (&" ".repeat((1 << 20) + 1), "more than 1048576 bytes"),
    ] {
        let error = PriorityMatrix::parse(text).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
        assert!(error.contains(r#"such as {"cpu:0": [["mlx5_0"], ["mlx5_1"]]}"#), "{error}");
        assert!(error.len() < 300, "{error}");
    }
}

#[test]
fn a_file_is_named_when_it_has_none() {
    let path = std::env::temp_dir().join(format!("millstream-matrix-{}", std::process::id()));
    fs::write(&path, r#"{"cpu:0": [["mlx5_0"], []]}"#).unwrap();
    let matrix = PriorityMatrix::read(&path).unwrap();
    assert_eq!(matrix.get("cpu:0"), Some(&priorities(&["mlx5_0"], &[])));
    fs::write(&path, r#"{"cpu:0": [["mlx5_0"]]}"#).unwrap();
    let parse = PriorityMatrix::read(&path).unwrap_err().to_string();
    fs::write(&path, b"\xff{}").unwrap();
    let read = PriorityMatrix::read(&path).unwrap_err().to_string();
    fs::remove_file(&path).unwrap();
    let absent = PriorityMatrix::read(&path).unwrap_err().to_string();
    let folder = PriorityMatrix::read(&std::env::temp_dir()).unwrap_err();
    let folder = format!("{:?}", causes_of(&folder));
    for (error, reason) in [(&parse, "two lists"), (&read, "cannot"), (&absent, "cannot")] {
        assert!(error.contains(reason) && error.contains("millstream-matrix-"), "{error}");
    }
    assert!(folder.contains("no regular file"), "{folder}");
    // It would be waited for.
    assert!(PriorityMatrix::read(&PathBuf::from("/dev/zero")).is_err());
}

/// An error, and why it came about.
fn causes_of(error: &dyn std::error::Error) -> Vec<String> {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect()
}

#[test]
fn a_filter_takes_nics_out_and_leaves_locations() {
    let text = r#"{"cpu:0":[["a","b"],["c"]],"cuda:0":[["c"],["a","b"]]}"#;
    let matrix = PriorityMatrix::parse(text).unwrap();
    let filtered = matrix.clone().filtered(&DeviceFilter::parse("b,a"));
    assert_eq!(filtered.to_json(), r#"{"cpu:0":[["a","b"],[]],"cuda:0":[[],["a","b"]]}"#);
    assert_eq!(matrix.clone().filtered(&DeviceFilter::all()), matrix);
}

/// Any matrix: names have any characters, and what is written of them must be escaped.
fn any_matrix() -> impl Strategy<Value = PriorityMatrix> {
    let names = || vec("\\PC{1,8}|[\\x00-\\x1f\"\\\\]{1,4}", 0..5);
    let priorities =
        (names(), names()).prop_map(|(preferred, available)| Priorities { preferred, available });
    vec(("(cpu|cuda):[0-9]{1,25}|\\PC{1,8}", priorities), 0..8).prop_map(|entries| {
        let mut matrix = PriorityMatrix::default();
        entries.into_iter().for_each(|(location, priorities)| matrix.insert(location, priorities));
        matrix
    })
}

proptest! {
    #[test]
    fn what_is_written_is_read(matrix in any_matrix()) {
        let text = matrix.to_json();
        prop_assert!(!text.contains('\n'));
        prop_assert_eq!(PriorityMatrix::parse(&text).unwrap(), matrix);
    }

    #[test]
    fn any_text_is_read_or_refused(text in "\\PC*") {
        let _ = PriorityMatrix::parse(&text);
    }

    /// Matrices with bytes of them changed, taken away or put in.
    #[test]
    fn what_is_read_of_a_damaged_text_is_a_matrix(
        matrix in any_matrix(),
        damages in vec((any::<prop::sample::Index>(), 0..3u8, "[\\[\\]{}\",:a0\\\\]"), 1..6),
    ) {
        let mut text: Vec<char> = matrix.to_json().chars().collect();
        for (at, kind, by) in damages {
            let at = at.index(text.len() + 1);
            match (kind, text.get_mut(at)) {
                (0, Some(char)) => *char = by.chars().next().unwrap(),
                (1, Some(_)) => drop(text.remove(at)),
                _ => text.insert(at, by.chars().next().unwrap()),
            }
        }
        let text: String = text.into_iter().collect();
        if let Ok(read) = PriorityMatrix::parse(&text) {
            prop_assert_eq!(PriorityMatrix::parse(&read.to_json()).unwrap(), read);
        }
    }
}
