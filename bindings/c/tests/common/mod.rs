//! How the tests find the library, and compile and run programs with it.

#![allow(dead_code, reason = "each test binary uses a part")]

pub(crate) mod cluster;
pub(crate) mod server;

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// As strict as users are.
const FLAGS: [&str; 5] = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-pthread"];

/// The folder of this package.
pub(crate) fn package() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Where cargo has put the library, and its name for the dynamic linker: beside the tests.
pub(crate) fn library_folder() -> PathBuf {
    let own = env::current_exe().unwrap();
    let folder = own.parent().unwrap();
    assert!(folder.join("libmillstream.so").is_file(), "no library in {}", folder.display());
    assert!(folder.join("libmillstream.so.0").is_file(), "no link to the library");
    folder.to_owned()
}

/// A folder of a test's own for what it makes.
pub(crate) fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// Runs a command to its end; what it says when it fails is shown.
pub(crate) fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (said(&output.stdout), said(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{stdout}{stderr}", output.status);
    output
}

/// The blocks of a guide in one language.
pub(crate) fn guide(name: &str, language: &str) -> Vec<String> {
    let text = fs::read_to_string(package().join("../../docs").join(name)).unwrap();
    let fence = format!("```{language}\n");
    let parts = text.split(&fence).skip(1);
    parts.map(|part| part.split_once("```").unwrap().0.to_owned()).collect()
}

/// The library as it is installed, below a folder.
pub(crate) fn install(prefix: &Path) -> PathBuf {
    let place = |path: &str| {
        let path = prefix.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        path
    };
    for header in ["transfer_engine_c.h", "millstream.h", "inccl.h"] {
        let to = place(&format!("include/{header}"));
        fs::copy(package().join("include").join(header), to).unwrap();
    }
    let library = library_folder().join("libmillstream.so");
    symlink(&library, place("lib/libmillstream.so.0")).unwrap();
    symlink("libmillstream.so.0", place("lib/libmillstream.so")).unwrap();
    let packages = place("lib/pkgconfig/millstream.pc");
    fs::copy(package().join("pkgconfig/millstream.pc"), &packages).unwrap();
    packages.parent().unwrap().to_owned()
}

/// A program that was compiled.
pub(crate) struct Program(pub(crate) PathBuf);

impl Program {
    /// As a command, with the library where it is.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.0);
        command.env("LD_LIBRARY_PATH", library_folder());
        command
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Output {
        run(self.command().args(arguments))
    }
}

/// Compiles a program of `tests/programs`.
pub(crate) fn compile(name: &str) -> Program {
    compile_with(name, &format!("tests/programs/{name}.c"), &[])
}

/// Compiles a source of this package.
pub(crate) fn compile_with(name: &str, source: &str, flags: &[&str]) -> Program {
    let program = folder(&format!("program-{name}")).join(name);
    let mut gcc = Command::new("gcc");
    gcc.args(FLAGS).args(["-O1", "-g"]).args(flags).arg("-o").arg(&program);
    gcc.arg(package().join(source)).arg("-I").arg(package().join("include"));
    gcc.arg("-I").arg(package().join("tests/programs"));
    run(gcc.arg("-L").arg(library_folder()).arg("-lmillstream"));
    Program(program)
}
