//! What the shared library shows to the dynamic linker.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use common::{folder, library_folder, package, run};

fn text(command: &mut Command) -> String {
    String::from_utf8(run(command).stdout).unwrap()
}

/// The functions that a header declares: a name before a parenthesis, at the end of a type.
fn functions(header: &str) -> BTreeSet<String> {
    let text = fs::read_to_string(package().join("include").join(header)).unwrap();
    let mut code = String::new();
    for (index, part) in text.split("/*").enumerate() {
        // What follows the end of a comment; all of it before the first.
        code.push_str(if index == 0 { part } else { part.split_once("*/").unwrap().1 });
    }
    let lines: Vec<&str> = code.lines().filter(|line| !line.starts_with('#')).collect();
    let code = lines.join(" ");
    let declared = code.split(';').filter_map(|declaration| {
        let (before, _) = declaration.split_once('(')?;
        let name = before.rsplit([' ', '*']).next()?;
        (!name.is_empty()).then(|| name.to_owned())
    });
    declared.collect()
}

#[test]
fn the_functions_of_the_headers_are_exported_and_nothing_else() {
    let mut declared = functions("transfer_engine_c.h");
    assert_eq!(declared.len(), 27, "{declared:?}");
    declared.extend(functions("millstream.h"));
    let collectives = functions("inccl.h");
    assert!(collectives.iter().all(|name| name.starts_with("inccl_")), "{collectives:?}");
    assert_eq!(collectives.len(), 22, "{collectives:?}");
    declared.extend(collectives);
    let library = library_folder().join("libmillstream.so");
    let symbols = text(Command::new("nm").args(["-D", "--defined-only", "-j"]).arg(library));
    let exported: BTreeSet<String> = symbols.lines().map(str::to_owned).collect();
    assert_eq!(exported, declared);
}

#[test]
fn it_has_a_versioned_name_and_needs_the_c_library_only() {
    let library = library_folder().join("libmillstream.so");
    let dynamic = text(Command::new("readelf").args(["-d", "-W"]).arg(library));
    let entries = |kind: &str| -> Vec<String> {
        let lines = dynamic.lines().filter(|line| line.contains(kind));
        lines.map(|line| line.split(['[', ']']).nth(1).unwrap().to_owned()).collect()
    };
    assert_eq!(entries("(SONAME)"), ["libmillstream.so.0"]);
    let allowed = ["libgcc_s.so.1", "libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"];
    for needed in entries("(NEEDED)") {
        assert!(allowed.contains(&needed.as_str()), "it needs {needed}");
    }
}

#[test]
fn the_headers_are_cpp_too_and_need_no_other_before_them() {
    let folder = folder("headers");
    for (compiler, name) in [("gcc", "it.c"), ("g++", "it.cpp")] {
        for header in ["transfer_engine_c.h", "millstream.h", "inccl.h"] {
            let source = folder.join(name);
            fs::write(&source, format!("#include <{header}>\n")).unwrap();
            let mut command = Command::new(compiler);
            command.args(["-fsyntax-only", "-pedantic", "-Wall", "-Wextra", "-Werror", "-I"]);
            run(command.arg(package().join("include")).arg(source));
        }
    }
}
