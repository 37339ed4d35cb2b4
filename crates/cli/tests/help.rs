//! Help, completions and manual pages: what the command says of itself.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use common::{Folder, Running, is_installed, run, skip};

#[test]
fn help_has_a_subcommand_too() {
    for (words, shows) in [
        (&["help"][..], "\n  allreduce "),
        (&["help", "put"], "Usage: millstream put "),
        (&["help", "bench", "transfer"], "Usage: millstream bench transfer "),
        (&["bench", "help", "transfer"], "Usage: millstream bench transfer "),
        (&["help", "rdma"], "\n  write-bw "),
    ] {
        let help = run(words).success().stdout;
        assert!(help.contains(shows), "{words:?}: {help}");
    }
    assert!(run(&["help", "frobnicate"]).failure(2).contains("frobnicate"));
    assert_eq!(run(&["-V"]).success().stdout, run(&["--version"]).success().stdout);
}

#[test]
fn help_ends_with_the_exit_statuses() {
    let help = run(&["--help"]).success().stdout;
    let (_, end) = help.split_once("\nExit status:\n").unwrap_or_else(|| panic!("{help}"));
    for status in ["\n  1  ", "\n  2  "] {
        assert!(end.contains(status), "{end}");
    }
}

#[test]
fn help_shows_nothing_that_only_says_not_yet() {
    for (words, hidden) in [
        (&["--help"][..], &["manual "][..]),
        (&["sim", "--help"], &["FILE.toml", "NAME|FILE"]),
        (&["config", "--help"], &["--reference"]),
    ] {
        let help = run(words).success().stdout;
        for word in hidden {
            assert!(!help.contains(word), "{word:?} is in {help}");
        }
    }
}

/// The pages in a folder, by name.
fn pages(folder: &Path) -> BTreeMap<String, String> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
    let page = |entry: std::io::Result<fs::DirEntry>| {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        (name, fs::read_to_string(path).unwrap())
    };
    entries.map(page).collect()
}

#[test]
fn the_manual_pages_are_those_of_this_version() {
    let folder = Folder::new();
    run(&["manual", folder.path().to_str().unwrap()]).success();
    let written = pages(folder.path());
    assert!(written.contains_key("millstream-bench-transfer.1"), "{:?}", written.keys());
    assert!(!written.keys().any(|name| name.contains("manual")), "{:?}", written.keys());
    let kept = pages(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/man"));
    for (name, page) in &written {
        assert!(kept.get(name) == Some(page), "{name} is out of date: run cargo xtask man");
    }
    assert!(kept.keys().eq(written.keys()), "run cargo xtask man");
    let missing = folder.file("no/folder");
    assert!(run(&["manual", &missing]).failure(1).contains(&missing));
}

/// The completions for a shell in a file, and the end of a command that is given that file.
fn complete(shell: &str, folder: &Folder, name: &str, arguments: &[&str]) -> Option<String> {
    if !is_installed(shell) {
        skip(&format!("{shell} is not installed"));
        return None;
    }
    let file = folder.file(name);
    fs::write(&file, run(&["completions", shell]).success().stdout).unwrap();
    let mut command = Command::new(shell);
    command.args(arguments).arg(&file).arg(folder.path());
    // Nothing of the user's own settings.
    command.env("HOME", folder.path()).env("TERM", "dumb").env_remove("ZDOTDIR");
    Some(Running::start(shell, &mut command).output().success().stdout)
}

#[test]
fn bash_completes() {
    let folder = Folder::new();
    let script = r#"
        source "$0"
        try() {
            COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
            _millstream millstream "${@: -1}" "${@: -2:1}"
            echo "$*: ${COMPREPLY[*]}"
        }
        try millstream pu
        try millstream bench tr
        try millstream put --off
        try millstream completions z
        try millstream manua
    "#;
    let arguments = ["--norc", "--noprofile", "-c", script];
    let Some(printed) = complete("bash", &folder, "bash", &arguments) else { return };
    assert_eq!(
        printed.lines().collect::<Vec<_>>(),
        [
            "millstream pu: put",
            "millstream bench tr: transfer",
            "millstream put --off: --offset",
            "millstream completions z: zsh",
            "millstream manua: ",
        ]
    );
}

#[test]
fn fish_completes() {
    let folder = Folder::new();
    let script = "source $argv[1]
        for line in 'millstream pu' 'millstream bench tr' 'millstream put --off' 'millstream manua'
            echo \"$line:\" (complete -C $line | string split -f1 \\t)
        end";
    let arguments = ["--no-config", "-c", script];
    let Some(printed) = complete("fish", &folder, "millstream.fish", &arguments) else { return };
    assert_eq!(
        printed.lines().map(str::trim_end).collect::<Vec<_>>(),
        [
            "millstream pu: put",
            "millstream bench tr: transfer",
            "millstream put --off: --offset",
            "millstream manua:",
        ]
    );
}

/// In an interactive shell, whose function `millstream` prints what was completed.
#[test]
fn zsh_completes() {
    let folder = Folder::new();
    let settings = r#"
        fpath=($ZDOTDIR $fpath)
        autoload -U compinit
        compinit -u -D
        unsetopt zle_bracketed_paste prompt_cr prompt_sp
        function millstream { print -r -- "<$*>" }
        PS1='ready> '
    "#;
    fs::write(folder.path().join(".zshrc"), settings).unwrap();
    let script = r#"
        zmodload zsh/zpty
        export ZDOTDIR=$2
        zpty shell zsh -i
        for line in 'millstream pu' 'millstream bench tr' 'millstream put --off' 'millstream completions z'; do
            zpty -r shell text '*ready> ' || exit 1
            zpty -n -w shell "$line"$'\t\n'
            zpty -r shell text '*>*'$'\n' || exit 1
            print -r -- "$line: ${${text##*<}%%>*}"
        done
        zpty -d shell
    "#;
    let arguments = ["-f", "-c", script, "zsh"];
    let Some(printed) = complete("zsh", &folder, "_millstream", &arguments) else { return };
    assert_eq!(
        printed.lines().map(str::trim_end).collect::<Vec<_>>(),
        [
            "millstream pu: put",
            "millstream bench tr: bench transfer",
            "millstream put --off: put --offset",
            "millstream completions z: completions zsh",
        ]
    );
}
