//! `cargo xtask package`: a Debian package of the command, its manual pages, completions and
//! licences, and of the C library with what programs are compiled with, made by dpkg-deb.

mod control;
mod notices;

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

pub(crate) use self::notices::notices;
use crate::{install, manual, process, programs};

/// What is in it.
const OURS: &[&str] = &["millstream", "millstream-c"];

/// Where the shells of Debian look for completions that packages bring.
const COMPLETIONS: &[(&str, &str)] = &[
    ("bash", "usr/share/bash-completion/completions/millstream"),
    ("zsh", "usr/share/zsh/vendor-completions/_millstream"),
    ("fish", "usr/share/fish/vendor_completions.d/millstream.fish"),
];

/// The name by which programs look for the C library, and that by which they are linked with it.
const LIBRARY: &str = "usr/lib/libmillstream.so.0";
const LIBRARY_LINK: &str = "usr/lib/libmillstream.so";

/// What programs are compiled with, and where it is installed: all headers, and a text whose folder says where all of it
/// is.
const HEADERS: (&str, &str) = ("bindings/c/include", "usr/include");
const PKG_CONFIG: (&str, &str) =
    ("bindings/c/pkgconfig/millstream.pc", "usr/lib/pkgconfig/millstream.pc");

/// A program of the guide to the C API: it compiles only with the headers, and says how it is called without arguments.
const EXAMPLE: &str = "bindings/c/examples/initiator.c";

/// The units of systemd.
const UNITS: (&str, &str) = ("packaging/systemd", "usr/lib/systemd/system");

/// Builds the package of an optimized millstream and library, or of those that `MILLSTREAM_BIN` and `MILLSTREAM_LIBRARY`
/// name, and tries what is in it.
pub(crate) fn run() -> Result<()> {
    let missing = install::ensure(install::FOR_PACKAGE);
    if let Some(need) = missing.first() {
        bail!("{} is missing: it {}", need.program, need.reason);
    }
    let program = programs::fast_millstream()?;
    let library = programs::fast_library()?;
    let package = build(&program, &library, &process::target_directory().join("package"))?;
    try_out(&package, &process::target_directory().join("package/installed"))?;
    let bytes = fs::metadata(&package)?.len();
    println!("{} ({:.1} MB)", package.display(), bytes as f64 / 1e6);
    Ok(())
}

/// Unpacks a package into a folder, runs the command that is in it, has the dynamic linker load the library, and
/// compiles and runs a program against it.
fn try_out(package: &Path, folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    process::run(Command::new("dpkg-deb").arg("--extract").arg(package).arg(folder))?;
    let said = process::output(Command::new(folder.join("usr/bin/millstream")).arg("--version"))?;
    let version = env!("CARGO_PKG_VERSION");
    ensure!(said.contains(version), "the command in the package says {said:?}, not {version}");
    let mut loaded = Command::new("/bin/true");
    let output = loaded.env("LD_PRELOAD", folder.join(LIBRARY)).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    // The dynamic linker says what it cannot load, and goes on.
    ensure!(output.status.success() && said.is_empty(), "the library cannot be loaded: {said}");
    try_compiling(folder)
}

/// As a user of the C library would, who knows nothing but what pkg-config says.
fn try_compiling(folder: &Path) -> Result<()> {
    let mut flags = Command::new("pkg-config");
    flags.args(["--cflags", "--libs", "millstream"]);
    let description = folder.join(PKG_CONFIG.1);
    flags.env("PKG_CONFIG_PATH", description.parent().context("it lies in a folder")?);
    let flags = process::output(&mut flags)?;
    let program = folder.join("initiator");
    let mut compiler = Command::new("gcc");
    compiler.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&program);
    compiler.arg(process::repository_root().join(EXAMPLE)).args(flags.split_whitespace());
    process::run(&mut compiler)?;
    let output = Command::new(&program).env("LD_LIBRARY_PATH", folder.join("usr/lib")).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(said.contains("usage: initiator"), "a program compiled with the package says {said:?}");
    Ok(())
}

/// Makes the package of this program and this library in a folder, and returns where.
fn build(program: &Path, library: &Path, folder: &Path) -> Result<PathBuf> {
    let root = folder.join("root");
    if root.exists() {
        fs::remove_dir_all(&root).with_context(|| format!("cannot remove {}", root.display()))?;
    }
    let tree = Tree { root: root.clone() };
    let text = fs::read(program).with_context(|| format!("cannot read {}", program.display()))?;
    tree.add("usr/bin/millstream", &text, 0o755)?;
    let library =
        fs::read(library).with_context(|| format!("cannot read {}", library.display()))?;
    add_library(&tree, &library)?;
    for (shell, path) in COMPLETIONS {
        let completions = process::output(Command::new(program).args(["completions", shell]))?;
        tree.add(path, completions.as_bytes(), 0o644)?;
    }
    add_manual(&tree)?;
    add_units(&tree)?;
    add_documents(&tree)?;
    let version = control::version();
    let architecture = process::output(Command::new("dpkg").arg("--print-architecture"))?;
    let architecture = architecture.trim();
    let both = [text, library].concat();
    let control = control::control(&version, architecture, tree.kibibytes()?, &both)?;
    tree.add("DEBIAN/control", control.as_bytes(), 0o644)?;
    // The dynamic linker is told of the library (deb-triggers(5)).
    tree.add("DEBIAN/triggers", b"activate-noawait ldconfig\n", 0o644)?;
    tree.add("DEBIAN/md5sums", tree.checksums()?.as_bytes(), 0o644)?;
    let package = folder.join(format!("millstream_{version}_{architecture}.deb"));
    let mut command = Command::new("dpkg-deb");
    // The same sources give the same package.
    command.env("SOURCE_DATE_EPOCH", control::commit_time("%ct")?);
    command.args(["--build", "--root-owner-group"]).arg(&root).arg(&package);
    process::output(&mut command)?;
    Ok(package)
}

fn add_library(tree: &Tree, library: &[u8]) -> Result<()> {
    tree.add(LIBRARY, library, 0o644)?;
    symlink("libmillstream.so.0", tree.root.join(LIBRARY_LINK))?;
    let root = process::repository_root();
    for entry in fs::read_dir(root.join(HEADERS.0))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        tree.add(&format!("{}/{name}", HEADERS.1), &fs::read(&path)?, 0o644)?;
    }
    tree.add(PKG_CONFIG.1, &fs::read(root.join(PKG_CONFIG.0))?, 0o644)
}

fn add_manual(tree: &Tree) -> Result<()> {
    let pages = process::repository_root().join(manual::PAGES);
    let entries = fs::read_dir(&pages)
        .with_context(|| format!("cannot list {}: run cargo xtask man", pages.display()))?;
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        tree.add_compressed(&format!("usr/share/man/man1/{name}.gz"), &fs::read(&path)?)?;
    }
    Ok(())
}

/// Which are started when an administrator enables them.
fn add_units(tree: &Tree) -> Result<()> {
    for entry in fs::read_dir(process::repository_root().join(UNITS.0))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        tree.add(&format!("{}/{name}", UNITS.1), &fs::read(&path)?, 0o644)?;
    }
    Ok(())
}

fn add_documents(tree: &Tree) -> Result<()> {
    let root = process::repository_root();
    let read =
        |path: &str| fs::read(root.join(path)).with_context(|| format!("cannot read {path}"));
    let place = |name: &str| format!("usr/share/doc/millstream/{name}");
    tree.add(&place("copyright"), &read("packaging/debian/copyright")?, 0o644)?;
    tree.add(&place("README.md"), &read("README.md")?, 0o644)?;
    tree.add(&place("command-line.md"), &read("docs/command-line.md")?, 0o644)?;
    tree.add_compressed(&place("changelog.gz"), &read("CHANGELOG.md")?)?;
    tree.add_compressed(&place("changelog.Debian.gz"), control::changelog()?.as_bytes())?;
    tree.add_compressed(&place("third-party-licences.gz"), notices(OURS)?.as_bytes())?;
    let overrides = read("packaging/debian/lintian-overrides")?;
    tree.add("usr/share/lintian/overrides/millstream", &overrides, 0o644)
}

/// The files of a package, as they lie in a folder.
struct Tree {
    root: PathBuf,
}

impl Tree {
    fn add(&self, path: &str, content: &[u8], mode: u32) -> Result<()> {
        let path = self.root.join(path);
        let cannot = || format!("cannot write {}", path.display());
        let folder = path.parent().unwrap_or(&self.root);
        fs::create_dir_all(folder).with_context(cannot)?;
        // Whatever the umask is: dpkg-deb takes the modes as they are.
        for folder in folder.ancestors().take_while(|folder| folder.starts_with(&self.root)) {
            fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).with_context(cannot)?;
        }
        fs::write(&path, content).with_context(cannot)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).with_context(cannot)
    }

    fn add_compressed(&self, path: &str, content: &[u8]) -> Result<()> {
        let plain = path.strip_suffix(".gz").context("a compressed file ends in .gz")?;
        self.add(plain, content, 0o644)?;
        // Without name and time: the same content gives the same file.
        let plain = self.root.join(plain);
        process::run(Command::new("gzip").args(["-9", "--no-name", "--force"]).arg(plain))
    }

    /// The files that are installed, in order, as paths from the root.
    fn files(&self) -> Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        let mut folders = vec![self.root.join("usr")];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder)? {
                let path = entry?.path();
                match path.is_dir() {
                    // What it leads to is there by itself.
                    _ if path.is_symlink() => {}
                    true => folders.push(path),
                    false => files.push(path.strip_prefix(&self.root)?.to_owned()),
                }
            }
        }
        files.sort();
        Ok(files)
    }

    /// The size that dpkg shows: each file in whole KiB.
    fn kibibytes(&self) -> Result<u64> {
        let sizes = self.files()?.into_iter().map(|file| {
            let metadata = fs::metadata(self.root.join(file))?;
            Ok(metadata.len().div_ceil(1024))
        });
        sizes.sum()
    }

    fn checksums(&self) -> Result<String> {
        let mut command = Command::new("md5sum");
        command.args(self.files()?).current_dir(&self.root).stderr(Stdio::inherit());
        let sums = process::output(&mut command)?;
        ensure!(!sums.is_empty(), "md5sum printed nothing");
        Ok(sums)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With any program that answers: `echo` stands for what prints completions, and for the library.
    #[test]
    fn a_package_has_what_it_should() {
        if !install::absent(install::FOR_PACKAGE).is_empty() {
            assert!(!process::everything_required(), "dpkg-deb is missing");
            println!("skipped: dpkg-deb is missing");
            return;
        }
        let folder = process::target_directory().join(format!("package-{}", std::process::id()));
        let echo = Path::new("/bin/echo");
        let package = build(echo, echo, &folder).unwrap();
        let error = try_out(&package, &folder.join("installed")).unwrap_err().to_string();
        assert!(error.contains("the command in the package says"), "{error}");
        let list = Command::new("dpkg-deb").arg("--contents").arg(&package).output().unwrap();
        let list = String::from_utf8(list.stdout).unwrap();
        let control =
            process::output(Command::new("dpkg-deb").arg("--info").arg(&package)).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        for path in [
            "usr/bin/millstream",
            "usr/share/man/man1/millstream.1.gz",
            "usr/share/man/man1/millstream-put.1.gz",
            "usr/share/bash-completion/completions/millstream",
            "usr/share/zsh/vendor-completions/_millstream",
            "usr/share/fish/vendor_completions.d/millstream.fish",
            "usr/share/doc/millstream/copyright",
            "usr/share/doc/millstream/README.md",
            "usr/share/doc/millstream/changelog.gz",
            "usr/share/doc/millstream/third-party-licences.gz",
            "usr/lib/libmillstream.so.0",
            "usr/lib/pkgconfig/millstream.pc",
            "usr/include/millstream.h",
            "usr/include/transfer_engine_c.h",
        ] {
            let line = list.lines().find(|line| line.ends_with(&format!(" ./{path}")));
            let line = line.unwrap_or_else(|| panic!("{path} is not in {list}"));
            let mode = if path.contains("/bin/") { "-rwxr-xr-x" } else { "-rw-r--r--" };
            assert!(line.starts_with(&format!("{mode} root/root")), "{line}");
        }
        let link = "./usr/lib/libmillstream.so -> libmillstream.so.0";
        assert!(list.lines().any(|line| line.starts_with('l') && line.ends_with(link)), "{list}");
        for field in ["Package: millstream\n", "Depends: libc6 (>= 2.", "Suggests: libibverbs1"] {
            assert!(control.contains(field), "{field} is not in {control}");
        }
    }
}
