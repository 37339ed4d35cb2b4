//! Which crate may depend on which.

use super::{Problem, Tree, crate_of, manifest};

/// Each crate, and the crates of this workspace that it may use. ARCHITECTURE.md says why.
const ARROWS: &[(&str, &[&str])] = &[
    ("wire", &[]),
    ("roce", &["wire"]),
    ("inc", &["wire", "roce"]),
    ("transfer-core", &[]),
    ("sim", &["wire", "roce", "inc", "transfer-core"]),
    ("net", &["wire", "roce"]),
    ("verbs", &["wire", "roce", "net"]),
    ("topology", &[]),
    ("lab", &[]),
    // For what the system's resolver says, which the standard library has as text only.
    ("metadata", &["net"]),
    // Memory that processes share is no RDMA, and no files are.
    ("transfer", &["net", "verbs", "metadata", "topology", "transfer-core"]),
    ("python", &["net", "verbs", "metadata", "topology", "transfer"]),
    // Ranks of one machine share memory; tokens are proved without a socket.
    ("collective", &["wire", "roce", "net", "verbs", "inc"]),
    // For its client of etcd: controllers share their state there.
    ("control", &["wire", "roce", "inc", "net", "metadata"]),
    // The shared library is another door to what the command offers, not a part of it.
    ("c", &["net", "verbs", "topology", "metadata", "transfer", "collective"]),
    (
        "cli",
        &[
            "wire",
            "roce",
            "inc",
            "sim",
            "net",
            "verbs",
            "topology",
            // `millstream lab` is it for users.
            "lab",
            "metadata",
            "transfer",
            "collective",
            "control",
        ],
    ),
];

/// Every dependency between crates is an arrow in [`ARROWS`], and every crate has its row.
///
/// Tests may use more (the simulator, above all), but nothing may use `cli`, tests included.
pub(super) fn dependencies(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (path, text) in manifest::manifests(tree) {
        let Some(user) = crate_of(path) else { continue };
        let Some((_, allowed)) = ARROWS.iter().find(|(name, _)| *name == user) else {
            problems.push(Problem::new(
                path,
                0,
                format!("{user} has no row in the table of arrows (xtask/src/tidy/arrows.rs)"),
            ));
            continue;
        };
        for dependency in manifest::dependencies(text) {
            let used = match dependency.package.strip_prefix("millstream") {
                Some("") => "cli",
                Some(rest) => match rest.strip_prefix('-') {
                    Some(name) => name,
                    None => continue,
                },
                None => continue,
            };
            let fine = match dependency.development {
                true => used != "cli",
                false => allowed.contains(&used),
            };
            if !fine {
                let what = format!("{user} must not depend on {used}");
                problems.push(Problem::new(path, dependency.line, what));
            }
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(user: &str, section: &str, dependency: &str) -> Vec<String> {
        let path = format!("crates/{user}/Cargo.toml");
        let text = format!("[{section}]\n{dependency} = {{ workspace = true }}\nlibc = \"1\"\n");
        let tree = Tree::of([(path.as_str(), text.as_str())]);
        dependencies(&tree).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn arrows_in_the_table_pass() {
        assert!(check("roce", "dependencies", "millstream-wire").is_empty());
        assert!(check("cli", "dependencies", "millstream-sim").is_empty());
        assert!(check("wire", "dev-dependencies", "millstream-sim").is_empty());
    }

    #[test]
    fn bindings_have_rows_too() {
        let text = "[dependencies]\nmillstream = { workspace = true }\n";
        let tree = Tree::of([("bindings/python/Cargo.toml", text)]);
        assert_eq!(dependencies(&tree).len(), 1);
    }

    #[test]
    fn other_arrows_fail() {
        assert_eq!(
            check("wire", "dependencies", "millstream-net"),
            ["crates/wire/Cargo.toml:2: wire must not depend on net"]
        );
        assert_eq!(check("transfer", "build-dependencies", "millstream-roce").len(), 1);
        assert_eq!(check("roce", "target.'cfg(unix)'.dependencies", "millstream-inc").len(), 1);
    }

    #[test]
    fn nothing_depends_on_the_command_not_even_a_test() {
        assert_eq!(check("control", "dependencies", "millstream").len(), 1);
        assert_eq!(check("control", "dev-dependencies", "millstream").len(), 1);
    }

    #[test]
    fn a_crate_without_a_row_fails() {
        let problems = check("novel", "dependencies", "libc-extra");
        assert_eq!(problems.len(), 1);
        assert!(problems[0].contains("no row"));
    }

    #[test]
    fn the_table_has_no_circle() {
        // Each row uses only crates of rows above it, so the arrows run one way.
        let order = |name: &str| ARROWS.iter().position(|(row, _)| *row == name).unwrap();
        for (user, allowed) in ARROWS {
            assert!(allowed.iter().all(|used| order(used) < order(user)), "{user}");
        }
    }
}
