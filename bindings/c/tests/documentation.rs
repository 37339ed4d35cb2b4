//! What docs/c.md shows: its programs are the examples, and its commands are run, as a reader would.

mod common;

use std::fs;
use std::process::Command;

use common::{folder, guide, install, package, run};

fn examples() -> Vec<(String, String)> {
    ["target.c", "initiator.c"]
        .map(|name| {
            (name.to_owned(), fs::read_to_string(package().join("examples").join(name)).unwrap())
        })
        .to_vec()
}

#[test]
fn the_programs_of_the_guide_are_the_examples() {
    let shown = guide("c.md", "c");
    assert!(shown.len() >= 4, "{}", shown.len());
    for block in shown {
        let known = examples().iter().any(|(_, text)| text.contains(&block));
        assert!(known, "no example has this:\n{block}");
    }
}

#[test]
fn the_tests_that_the_guide_names_are_there() {
    let root = package().join("../..");
    let text = fs::read_to_string(root.join("docs/c.md")).unwrap();
    let named: Vec<_> = text.split('`').filter_map(|name| name.split_once("::")).collect();
    assert!(named.len() >= 10, "{named:?}");
    for (file, test) in named {
        let source = fs::read_to_string(root.join(file)).unwrap();
        assert!(source.contains(&format!("#[test]\nfn {test}()")), "{file} has no test {test}");
    }
}

#[test]
fn the_commands_of_the_guide_do_what_it_says() {
    let here = folder("guide");
    let packages = install(&here.join("prefix"));
    for (name, text) in examples() {
        fs::write(here.join(name), text).unwrap();
    }
    let script = guide("c.md", "sh").concat();
    assert!(script.contains("pkg-config"), "{script}");
    let mut shell = Command::new("sh");
    shell.args(["-eu", "-c", &script]).current_dir(&here);
    shell.env("PKG_CONFIG_PATH", packages).env("LD_LIBRARY_PATH", here.join("prefix/lib"));
    let output = run(&mut shell);
    let said = String::from_utf8(output.stdout).unwrap();
    let whole = "the initiator says it is there: abcdefghijklmnopqrstuvwxyz\n";
    assert!(said.contains("the same\n") && said.ends_with(whole), "{said}");
    let complaint = String::from_utf8(output.stderr).unwrap();
    assert!(complaint.contains("10 bytes at 0x1000 do not lie in a buffer"), "{complaint}");
}

#[test]
fn the_package_has_the_version_of_the_library() {
    let packages = install(&folder("package"));
    let mut command = Command::new("pkg-config");
    command.env("PKG_CONFIG_PATH", packages).args(["--modversion", "millstream"]);
    let version = String::from_utf8(run(&mut command).stdout).unwrap();
    assert_eq!(version.trim(), env!("CARGO_PKG_VERSION"));
}
