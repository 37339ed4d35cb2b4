//! The shared library's name for the dynamic linker.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// Programs look for this. It changes when a program that was linked before would not work any more.
const SONAME: &str = "libmillstream.so.0";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,{SONAME}");
    // A program that was linked with the library where cargo puts it is to find it there.
    let out = env::var_os("OUT_DIR").map(PathBuf::from);
    if let Some(folder) = out.as_deref().and_then(|out| out.ancestors().nth(3)) {
        for folder in [folder.to_owned(), folder.join("deps")] {
            link(&folder);
        }
    }
}

/// Best effort: whoever installs the library makes this link, too.
fn link(folder: &Path) {
    let link = folder.join(SONAME);
    if fs::read_link(&link).is_ok() {
        return;
    }
    if let Err(error) = symlink("libmillstream.so", &link) {
        println!("cargo:warning=no link {}: {error}", link.display());
    }
}
